"""The processor that passes see. A plan, and a test of it, must not depend on the machine that runs the tests.

All tests plan for `PINNED`, which need not be here: GEMMs in bfloat16 run everywhere, and are slow where no instruction
multiplies them. Tests marked ``cpu_dependent`` plan for the processor at hand.
"""

from __future__ import annotations

import pytest

from fxprec.config.processor import Processor

PINNED = Processor.parse("avx512+bf16")
AT_HAND = Processor.here()


def plan_on(patch: pytest.MonkeyPatch, processor: Processor | str) -> None:
    """Let passes see this processor."""
    found = Processor.parse(processor) if isinstance(processor, str) else processor
    patch.setattr(Processor, "here", lambda: found)
