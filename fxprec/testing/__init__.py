"""The numerics kit: tests that keep a model's numerics from regressing (docs/testing.md).

In pytest the fixture ``numerics`` does everything; `verify`, `verify_training` and `assert_identical` do the same
without pytest. Importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxprec.testing.check import Thresholds as Thresholds
    from fxprec.testing.check import verify as verify
    from fxprec.testing.fixture import Numerics as Numerics
    from fxprec.testing.identical import assert_identical as assert_identical
    from fxprec.testing.training import verify_training as verify_training

_HOMES = {
    "Numerics": "fixture",
    "Thresholds": "check",
    "assert_identical": "identical",
    "verify": "check",
    "verify_training": "training",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"fxprec.testing.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fxprec.testing' has no attribute {name!r}")
