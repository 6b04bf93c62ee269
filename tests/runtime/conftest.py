"""The compact allocator's memory, for the tests that install it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from fxprec.driver import option_checks
from fxprec.runtime.cpu import compact

KIB = 1024


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Install it; give the bytes that are live in it already. Afterwards new tensors come from the system again."""
    monkeypatch.setattr(option_checks, "_process", option_checks._Process())
    assert compact.install() is None
    gc.collect()
    filled = _fill_holes()  # that other tests left
    compact.trim()
    yield compact.sizes().live
    del filled
    compact.uninstall()


def _fill_holes() -> list[torch.Tensor]:
    """Take every hole of the region that tensors of 16 KiB and more fit, so that new ones lie at its end."""
    filled = list[torch.Tensor]()
    for kib in (1 << i for i in range(20, 3, -1)):
        while True:
            end = compact.sizes().end
            tensor = torch.empty(kib * KIB, dtype=torch.uint8)
            if compact.sizes().end > end:
                break
            filled.append(tensor)
    return filled
