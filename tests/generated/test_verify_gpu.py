"""``verify=True`` where a GPU's lowering calls kernels: a fault of each kind is named, and the step is right.

Lowered for a GPU, run in Triton's interpreter: in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from generated.test_gemm_training import A100, H100, lowered, train
from interpreted import interpreted
from torch import Tensor

import fxprec
from fxprec.driver import verify_references
from fxprec.ir.symbolic import PACK_BITS, UNPACK_BITS
from fxprec.kernels.counts import Ln
from fxprec.kernels.layout import SideBySide
from fxprec.passes.analysis import gemm_costs

pytestmark = [interpreted, pytest.mark.filterwarnings("ignore:weigh-gemms")]
Spoil = Callable[[Any], Any]
assert lowered  # the fixture


def flipped(x: Tensor) -> Tensor:
    """Change one element by a bit that no rounding explains."""
    x = x.clone()
    first = x.flatten()[:1]
    if x.dtype.is_floating_point and x.itemsize > 1:
        first += 1 + first.abs()
    else:
        first.view(torch.uint8)[:1] ^= 0x30
    return x


def at(position: int) -> Spoil:
    return lambda results: tuple(flipped(x) if i == position else x for i, x in enumerate(results))


FAULTS = {
    "none, native": ("native", "", None, ""),
    "none, packed": ("packed", "", None, ""),
    "codes": (
        "native",
        "transpose.quantize_transpose",
        at(1),
        r"quantize\+transpose \S+: \d+ of .* its transposed codes",
    ),
    "statistics": ("native", "transpose.quantize_transpose", at(2), r"quantize\+transpose \S+: its statistics of row"),
    "product": ("packed", "matmul.matmul", at(0), r"gemm \S+ x \S+: \d+ of \d+ elements of its product"),
    "totals": ("packed", "totals.totals", flipped, "totals: its sums of rows"),
}


def plant(monkeypatch: pytest.MonkeyPatch, place: str, spoil: Spoil) -> None:
    path, name = f"fxprec.runtime.gemm.{place}".rsplit(".", 1)
    module = importlib.import_module(path)
    usual = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: spoil(usual(*args, **options)))


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_each_kind_is_named_and_right_kernels_have_none(
    kind: str, monkeypatch: pytest.MonkeyPatch, lowered: list[Any]
) -> None:
    storage, place, spoil, words = FAULTS[kind]
    native = storage == "native"
    monkeypatch.setattr(gemm_costs, "gpu_of", lambda device: H100 if native else A100)
    if spoil is not None:
        plant(monkeypatch, place, spoil)
    options = {"recipe": "fp8" if native else "hfp8", "storage": storage}
    caught = pytest.warns(fxprec.FxprecWarning, match=f"^kernel {words}") if spoil else contextlib.nullcontext()
    with caught, warnings.catch_warnings():
        if spoil is None:
            warnings.simplefilter("error", fxprec.FxprecWarning)
            warnings.filterwarnings("ignore", "weigh-gemms")
        found, _ = train("auto", verify=True, **options)
    wanted, _ = train("eager", **options)
    for got, right in zip(found, wanted, strict=True):
        assert torch.equal(got, right)


def test_every_kernel_of_a_lowered_graph_is_compared(monkeypatch: pytest.MonkeyPatch, lowered: list[Any]) -> None:
    """A kernel without a reference would be passed over in silence."""
    monkeypatch.setattr(gemm_costs, "gpu_of", lambda device: A100)
    train("auto", recipe="hfp8", storage="packed")
    known = verify_references.REFERENCES
    called = {n.target for gm in lowered for n in gm.graph.nodes if str(n.target).startswith("fxprec")}
    assert called
    moves_bytes, in_inductors_loops = SideBySide.target, {Ln.target, PACK_BITS, UNPACK_BITS}
    assert called - known.keys() <= {moves_bytes, *in_inductors_loops}
