"""Masks in bits: the packing beside NumPy's, what is packed, and gradients that are masked as in float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import compiled, eager_backend
from hypothesis import given
from hypothesis import strategies as st
from models import Apply
from one_pass import run_pass
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxprec
import fxprec.runtime.reference_ops
from fxprec import compat
from fxprec.ir.symbolic import PACK_BITS, UNPACK_BITS
from fxprec.numerics.bits import folded, packed, packed_shape, unpacked
from fxprec.passes import choose_crossings
from fxprec.passes.analysis.joint import is_backward
from fxprec.passes.base import Work
from fxprec.passes.crossings.costs import Rates
from fxprec.passes.crossings.moments import Fit
from fxprec.passes.crossings.needs import Needs
from fxprec.passes.crossings.problem import Problem
from fxprec.passes.forms.bits import Bits
from fxprec.passes.forms.low import Low
from fxprec.passes.lowering.bits import lower_bits

SIZES = st.integers(1, 24)
SHAPES = st.lists(SIZES, min_size=2, max_size=5).filter(lambda shape: folded(shape) and math.prod(shape) < 1 << 16)


@given(SHAPES, st.integers(0, 9))
def test_bits_are_numpys(shape: list[int], seed: int) -> None:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    first, last = folded(shape)
    slices = x.numpy().reshape(*shape[:first], 8, -1, *shape[last + 1 :])
    q = packed(x)
    assert np.array_equal(q.numpy(), np.packbits(slices, first, "little").squeeze(first))
    assert list(q.shape) == packed_shape(shape)
    assert torch.equal(unpacked(q, shape), x)


def test_one_dimension_is_split_and_not_the_last() -> None:
    assert folded([8, 8, 8]) == (0, 0)
    assert folded([3, 64, 16, 5]) == (2, 2), "an image's channels lie together in channels-last"
    assert folded([3, 64, 5, 5]) == (1, 1)
    assert folded([4, 6, 5]) == (0, 1)
    assert folded([3, 5, 64]) is None
    assert folded([64]) is None
    assert folded([]) is None
    assert folded(["batch", 16, 5]) == (1, 1)


@pytest.mark.inductor
def test_inductors_loops_pack_the_same_bits() -> None:
    shapes = [(16, 128), (3, 16, 40), (4, 6, 5, 16)]
    masks = [torch.rand(shape) < 0.5 for shape in shapes]

    def both(masks: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        packed = [PACK_BITS(mask.logical_not().logical_not()) for mask in masks]
        return [(q, UNPACK_BITS(q, list(mask.shape))) for q, mask in zip(packed, masks, strict=True)]

    def lowered(gm: GraphModule, args: list[Tensor]) -> Callable[..., object]:
        lower_bits(gm.graph)
        return compat.compile_fx(gm, args)

    torch._dynamo.reset()
    for mask, (q, read) in zip(masks, torch.compile(both, backend=lowered)(masks), strict=True):
        assert torch.equal(q, packed(mask))
        assert torch.equal(read, mask)


def images(norm: bool = True) -> nn.Module:
    torch.manual_seed(0)
    between = [nn.BatchNorm2d(16)] if norm else []
    return nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), *between, nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1))


def held(model: nn.Module | Callable[..., Tensor], *args: Tensor, recipe: str = "fp8") -> dict[str, int]:
    """Bytes that a step saves, by format."""
    low_ratio = 1.0 if recipe == "fp8" else None
    compiled(model, backend := eager_backend(recipe, low_ratio=low_ratio))(*args).sin().sum().backward()
    found: dict[str, int] = {}
    for row in backend.plans[0].saved:
        found[row.format] = found.get(row.format, 0) + row.bytes
    return found


def test_behind_a_norm_the_relu_is_recomputed_and_its_mask_is_in_bits() -> None:
    """Beside 8 bits of the convolution's result: 9 bits an element in the place of 16."""
    elements = 8 * 16 * 16 * 16
    found = held(images(), torch.randn(8, 4, 16, 16))
    assert found["bit"] == elements // 8
    assert found["e4m3fn"] == elements + 8 * 4 * 16 * 16, "and the input"


def test_a_relu_that_is_stored_anyway_is_compared_again() -> None:
    assert "bit" not in held(images(norm=False), torch.randn(8, 4, 16, 16))


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_dropouts_mask_is_in_bits(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.3), nn.Linear(64, 8))
    found = held(model, torch.randn(128, 32), recipe=recipe)
    assert found["bit"] == 128 * 64 // 8
    assert "bool" not in found


def test_a_maximums_comparisons_are_in_bits() -> None:
    found = held(torch.maximum, *(torch.randn(64, 32, requires_grad=True) for _ in range(2)))
    assert found == {"bit": 3 * 64 * 32 // 8}


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: F.dropout(x, 0.3), (31, 64)),  # no dimension but the last is a multiple of 8
        (lambda x: F.dropout(x, 0.3), (8, 64)),  # short
    ],
    ids=["odd", "short"],
)
def test_other_masks_stay_booleans(function: Callable[[Tensor], Tensor], shape: tuple[int, int]) -> None:
    found = held(nn.Sequential(nn.Linear(shape[1], 64), Apply(function)), torch.randn(shape))
    assert "bit" not in found
    assert found["bool"] > 0


def test_a_mask_of_the_models_own_is_packed_and_not_compared_again() -> None:
    """Backward would compare what it recomputes from rounded values; the model may depend on each element's side."""
    model = nn.Sequential(nn.Linear(32, 64), Apply(lambda x: x * (x > 0.3)), nn.Linear(64, 8))
    ran = run_pass("choose-crossings", model, torch.randn(128, 32))
    assert ran.halves(torch.ops.aten.gt.Scalar) == (1, 0)
    assert len(ran.nodes(PACK_BITS)) == 1


def test_a_mask_of_dynamic_shape_stays_booleans() -> None:
    backend = eager_backend("fp8", low_ratio=1.0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.3), nn.Linear(64, 8))
    step = torch.compile(model, backend=backend, dynamic=True)
    for size in (128, 64):
        step(torch.randn(size, 32)).sum().backward()
    assert "bool" in {row.format for row in backend.plans[-1].saved}


def test_a_mask_that_the_user_gets_too_stays_booleans() -> None:
    def model(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.rand(64, 32) > 0.2
        return torch.where(mask, x @ w, 0), mask

    args = torch.randn(64, 16), torch.randn(16, 32, requires_grad=True)
    step = compiled(model, backend := eager_backend("fp8", low_ratio=1.0))
    y, mask = step(*args)
    y.sum().backward()
    assert mask.dtype is torch.bool
    assert "bit" not in {row.format for row in backend.plans[0].saved}


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky relu": F.leaky_relu,
    "hardshrink": F.hardshrink,
    "threshold": lambda x: F.threshold(x, 0.3, -1.0),
    "softshrink": F.softshrink,
    "clamp": lambda x: x.clamp(-0.7, 0.4),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gradient_is_masked_as_in_float32(name: str, layout: torch.memory_format) -> None:
    x, weight = (torch.randn(8, 16, 12, 10).to(memory_format=layout) for _ in range(2))
    shifts = [torch.zeros_like(x, requires_grad=True) for _ in range(2)]

    def model(x: Tensor, shift: Tensor) -> Tensor:
        return ACTIVATIONS[name](x * 2 + shift)

    (compiled(model, backend := eager_backend("fp8", low_ratio=1.0))(x, shifts[0]) * weight).sum().backward()
    (model(x, shifts[1]) * weight).sum().backward()
    assert torch.equal(shifts[0].grad, shifts[1].grad)
    assert {row.format for row in backend.plans[0].saved} == {"bit"}


def test_what_combines_comparisons_moves_with_them() -> None:
    """Hardtanh's backward asks whether its operand is at one bound or the other."""
    x, shift = torch.randn(64, 32), torch.zeros(64, 32, requires_grad=True)
    ran = run_pass("compare-in-forward", lambda x, y: F.hardtanh(x + y, -0.5, 0.5) * x, x, shift)
    aten = torch.ops.aten
    assert [ran.halves(t) for t in (aten.le.Scalar, aten.ge.Scalar, aten.bitwise_or.Tensor)] == [(1, 0)] * 3
    assert {node.name for node in ran.work.comparisons} == {
        node.name for t in (aten.le.Scalar, aten.ge.Scalar, aten.bitwise_or.Tensor) for node in ran.nodes(t)
    }


def test_comparisons_in_a_checkpointed_region_stay_behind_it() -> None:
    layer = nn.Linear(32, 32)

    def model(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.relu(layer(x)) * 2, x, use_reentrant=False)

    ran = run_pass("compare-in-forward", model, torch.randn(64, 32))
    assert ran.halves(torch.ops.aten.le.Scalar) == (0, 1)


@pytest.mark.parametrize("budget", ["100%", "85%"])
def test_under_a_peak_budget_masks_are_in_bits_as_well(budget: str) -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Dropout(0.2), nn.ReLU())))
    step = compiled(model, backend := eager_backend("fp8", low_ratio=None, peak_budget=budget))
    step(torch.randn(256, 64)).sum().backward()
    assert all(row.format != "bool" for row in backend.plans[0].saved)
    assert any("in bits" in remark for remark in backend.plans[0].notes)


def test_the_packed_mask_is_read_in_backward_alone() -> None:
    ran = run_pass("choose-crossings", images(), torch.randn(8, 4, 16, 16))
    (read,) = ran.nodes(UNPACK_BITS)
    assert all(is_backward(user) for user in read.users)


def test_forward_reads_the_packed_mask_too() -> None:
    """Else the random numbers, or the booleans, would stay in memory until their last reader in forward."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.3), nn.Linear(64, 8))
    ran = run_pass("choose-crossings", model, torch.randn(128, 32))
    (pack,), (read,) = ran.nodes(PACK_BITS), ran.nodes(UNPACK_BITS)
    assert list(pack.all_input_nodes[0].users) == [pack]
    assert {is_backward(user) for user in read.users} == {False, True}


def test_the_mask_of_what_a_gemm_multiplies_is_that_of_its_16_bits() -> None:
    """Else the float32 result would be written for the mask alone."""
    ran = run_pass("sum-narrow", images(), torch.randn(8, 4, 16, 16))
    (mask,) = ran.work.comparisons
    assert mask.args[0].meta["val"].dtype is torch.bfloat16


def test_a_comparison_that_backward_repeats_is_not_in_forwards_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[tuple[Needs, Fit]] = []
    monkeypatch.setattr(choose_crossings, "_remark", lambda needs, fit: fits.append((needs, fit)) or "")
    compiled(images(norm=False), eager_backend("fp8", low_ratio=None, peak_budget="100%"))(torch.randn(8, 4, 16, 16))
    ((needs, fit),) = fits
    (mask,) = needs.comparisons
    assert mask not in fit.replay.kept
    assert mask not in fit.replay.at


@pytest.mark.parametrize(
    ("shape", "order", "is_packed"),
    [((64, 32), (0, 1), True), ((6, 64, 5), (0, 1, 2), False), ((64, 32), (1, 0), False), ((8, 129), (0, 1), False)],
    ids=["pieces", "behind another dimension", "transposed", "not by four"],
)
def test_a_gpu_draws_bits_only_of_slices_in_one_piece(
    shape: tuple[int, ...], order: tuple[int, ...], is_packed: bool
) -> None:
    """Inductor's loop draws four numbers at once there, for places that follow each other (torch 2.13)."""
    with FakeTensorMode():
        mask = torch.empty(shape, dtype=torch.bool, device="cuda").permute(order)
        assert Bits.can_hold(mask, is_drawn=True) == is_packed
        assert Bits.can_hold(mask)
        assert Bits.can_hold(torch.empty(shape, dtype=torch.bool).permute(order), is_drawn=True)


@pytest.mark.inductor
@pytest.mark.parametrize(
    "config", [fxprec.Config(recipe="bf16"), fxprec.Config(recipe="fp32", peak_budget="100%")], ids=["bf16", "fp32"]
)
def test_dropout_in_bits_drops_what_inductor_drops(config: fxprec.Config) -> None:
    """One loop draws and packs; nowhere do random numbers lie in memory."""

    def masks(backend: object) -> tuple[list[Tensor], str]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        x, layer = torch.ones(512, 256, requires_grad=True), nn.Linear(256, 256, bias=False)
        nn.init.eye_(layer.weight)
        step, found = torch.compile(nn.Sequential(layer, nn.Dropout(0.3)), backend=backend), list[Tensor]()

        def run() -> None:
            for _ in range(2):
                x.grad = None
                y = step(x)
                y.sum().backward()
                assert torch.equal(y != 0, x.grad != 0), "forward's mask and backward's"
                found.append(y != 0)

        _, (forward, *_) = run_and_get_code(run)
        return found, forward

    ours, code = masks(fxprec.Backend(config))
    theirs, _ = masks("inductor")
    assert all(map(torch.equal, ours, theirs))
    assert not torch.equal(*ours)
    assert "empty_strided_cpu((64, 256), (256, 1), torch.uint8)" in code
    assert code.count("normalized_rand_cpu(") >= 8
    assert "empty_strided_cpu((512, 256), (256, 1), torch.bool)" not in code


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:verify=True. nothing is compared in a graph half")
def test_a_lowered_graph_that_draws_can_be_verified() -> None:
    """Verifying runs the lowered graph node by node: a draw without a reference ended it with an error."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    config = fxprec.Config(recipe="hfp8", storage="packed", low_ratio=1.0, lowering="inductor", verify=True)
    step = torch.compile(model, backend=(backend := fxprec.Backend(config)))
    step(torch.randn(64, 64)).sum().backward()
    assert "bit" in {row.format for row in backend.plans[0].saved}
    assert {event.site for event in backend.events if event.kind == "fallback"} <= {"verify=True"}, "no kernel"


def test_what_a_search_completes_has_no_mask_of_a_value_computed_from_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    within, found = choose_crossings.within_budget, list[object]()

    def watch(work: Work, needs: Needs, *rest: object) -> object:
        (mask,) = needs.comparisons
        lows = {node: form for node, forms in needs.forms.items() for form in forms if isinstance(form, Low)}
        first = min(lows)  # what the norm subtracts from
        ways = Problem(needs, Rates.of(torch.device("cpu")), ("narrow", "recompute")).completed({first: lows[first]})
        assert ways is not None
        found.append(ways[mask])
        return within(work, needs, *rest)

    monkeypatch.setattr(choose_crossings, "within_budget", watch)
    compiled(images(), eager_backend("fp8", low_ratio=None, peak_budget="100%"))(torch.randn(8, 4, 16, 16))
    assert found == [Bits()]
