"""The items of ``fxprec gpu-check`` on a GPU, one test each; skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest

from fxprec.gpu_check import machine
from fxprec.gpu_check.items import ITEMS, Item
from fxprec.gpu_check.run import run_items

WHY_NOT = machine.refused()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
def test_on_the_gpu(item: Item) -> None:
    (found,) = run_items([item], dry=False, limit=300)
    print(found.facts, found.left_out)
    assert not found.failed, "\n".join(f"{f['case']}: {f['why']}\n{f['detail']}" for f in found.failed)
    if found.status == "skipped":
        pytest.skip("; ".join(f"{entry['what']}: {entry['why']}" for entry in found.left_out))
