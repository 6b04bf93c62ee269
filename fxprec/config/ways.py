"""The ways in which backward may get a value: those that users allow, and those that a plan names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

BLOCK_WAYS = ("int4", "int2")
WAYS = ("narrow", *BLOCK_WAYS, "recompute", "offload")
"""The names that `Config.ways` takes."""
DEFAULT_WAYS = ("narrow", "recompute")

Way = Literal["", "keep", "narrow", "recompute", "offload"]
"""The names in a plan's rows. A value in a block format has the way ``"narrow"``."""
WAYS_SAID: Mapping[Way, str] = {
    "keep": "kept",
    "narrow": "kept",
    "recompute": "recomputed",
    "offload": "in host memory",
}
"""The text for each way in a plan's explanations."""
