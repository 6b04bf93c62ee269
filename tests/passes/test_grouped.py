"""Grouped products of a mixture of experts: GEMMs of their own, their gradients, and their operands in blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import compiled, eager_backend, gradients, recorded_works
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxprec
from fxprec import Operands, Recipe
from fxprec.passes.analysis.replay.kernels import flops_of
from fxprec.runtime.grouped_mm import grouped_mm, is_aligned, pad_groups, padded_ends

ENDS = torch.tensor([5, 5, 16, 37], dtype=torch.int32)  # an expert without tokens, and 3 of 40 tokens without an expert
TOKENS, WIDTH, HIDDEN = 40, 32, 64
OPERATOR = "fxprec.grouped_mm"


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def experts_of(ends: Tensor = ENDS) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *ends.tolist()[:-1]], ends.tolist(), strict=True)]


class Experts(nn.Module):
    """Two grouped products, of tokens that are sorted already; weights as transformers has them, (G, out, in)."""

    def __init__(self, multiply: Any = None) -> None:
        super().__init__()
        self.multiply = multiply or torch.ops.fxprec.grouped_mm
        self.up = nn.Parameter(draw(len(ENDS), HIDDEN, WIDTH, seed=1) * WIDTH**-0.5)
        self.down = nn.Parameter(draw(len(ENDS), HIDDEN, WIDTH, seed=2) * HIDDEN**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.multiply(x * 1.0, self.up.mT, ENDS))
        return self.multiply(h, self.down, ENDS)


def in_bf16(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return F.grouped_mm(x.bfloat16(), w.bfloat16(), offs=offs).float()


def expert_by_expert(model: Experts, x: Tensor) -> Tensor:
    found = [F.silu(x[t] @ up.mT) @ down for t, up, down in zip(experts_of(), model.up, model.down, strict=True)]
    return torch.cat([*found, x.new_zeros(TOKENS - int(ENDS[-1]), WIDTH)])


def stepped(f: Any, x: Tensor, model: nn.Module) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return the result, parameters' gradients, and that of the input."""
    x = x.clone().requires_grad_()
    out = f(x)
    (out[: int(ENDS[-1])] * torch.arange(float(WIDTH))).square().mean().backward()
    assert x.grad is not None
    return out.detach(), gradients(model), x.grad


def recipe(**operands: Any) -> Recipe:
    return Recipe(name="test", hi="fp32", lo_forward="fp32", lo_backward="fp32", operands=Operands(**operands))


@pytest.mark.parametrize("shapes", [((9, 4), (3, 4, 5)), ((3, 5, 4), (4, 9)), ((4, 9), (9, 5))], ids=str)
def test_gradients_are_those_of_finite_differences(shapes: Any) -> None:
    ends = torch.tensor([4, 4, 7])
    operands = [draw(*shape, seed=i, dtype=torch.float64).requires_grad_() for i, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(lambda a, b: torch.ops.fxprec.grouped_mm(a, b, ends), operands)


def test_a_product_is_that_of_each_group_and_zero_beyond_the_last() -> None:
    x, w = draw(TOKENS, WIDTH), draw(4, WIDTH, HIDDEN)
    x[37:] = torch.nan
    out = grouped_mm(x, w, ENDS)
    for i, tokens in enumerate(experts_of()):
        assert torch.equal(out[tokens], x[tokens] @ w[i])
    assert not out[37:].any()


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(100, 64), torch.empty(64, 100).mT, torch.empty(4, 8, 24), torch.empty(4, 24, 8).mT,
        torch.empty(100, 63), torch.empty(63, 100).mT[:, ::2], torch.empty(1, 8).expand(100, 8), torch.empty(100, 12),
    ],
    ids=lambda x: f"{tuple(x.shape)} {x.stride()}",
)  # fmt: skip
def test_a_tensor_goes_to_torchs_kernel_where_torch_takes_it(x: Tensor) -> None:
    """torch's meta function has the checks of the kernel, which no test can run without a GPU."""
    offs = torch.empty(4, dtype=torch.int32, device="meta")
    layout = torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16, device="meta")
    other = torch.empty((4, x.shape[-1], 64) if x.ndim == 2 else (x.shape[-1], 64), dtype=torch.bfloat16, device="meta")
    try:
        torch._grouped_mm(layout, other, offs=offs)
        takes = True
    except RuntimeError:
        takes = False
    assert is_aligned(layout) == takes


def test_operands_of_two_dtypes_are_refused_by_name() -> None:
    model = Experts(lambda x, w, offs: torch.ops.fxprec.grouped_mm(x.bfloat16(), w, offs))
    with pytest.raises(Exception, match=r"multiplies torch.bfloat16 by torch.float32; give both operands one dtype"):
        compiled(model, eager_backend("bf16"))(draw(TOKENS, WIDTH))


@pytest.mark.parametrize("unit", [1, 16, 32])
def test_padded_groups_begin_at_multiples_and_hold_their_tokens(unit: int) -> None:
    x = draw(TOKENS, 3)
    padded, ends = pad_groups(x, ENDS, unit), padded_ends(ENDS, unit)
    begin = 0
    for tokens, end in zip(experts_of(), ends.tolist(), strict=True):
        size = tokens.stop - tokens.start
        assert (begin % unit, end - begin) == (0, -(-size // unit) * unit)
        assert torch.equal(padded[begin : begin + size], x[tokens])
        assert not padded[begin + size : end].any()
        begin = end
    assert not padded[begin:].any()
    assert len(padded) % unit == 0


def test_each_grouped_product_is_a_gemm_between_groups_of_tensors() -> None:
    backend, model = eager_backend("fp8", low_ratio=1.0), Experts()
    with recorded_works() as works:
        compiled(model, backend)(draw(TOKENS, WIDTH)).sum().backward()
    (plan,) = backend.plans
    assert [gemm.op for gemm in plan.gemms] == [OPERATOR] * 2
    assert [(gemm.group_before, gemm.group_after) for gemm in plan.gemms] == [(0, 1), (1, 2)]
    assert {site.tensor: site.format for site in plan.sites if site.reads == "backward"}["mul"] == "e4m3fn"
    products = [n for n in works[0].joint.graph.nodes if str(n.target).startswith(OPERATOR)]
    assert {flops_of(n) for n in products} == {2.0 * TOKENS * WIDTH * HIDDEN}, "forward's and backward's are as large"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpoint"])
def test_result_and_gradients_are_those_of_one_expert_after_the_other(dtype: torch.dtype, again: bool) -> None:
    """torch compiles `F.grouped_mm` of bfloat16 alone, and leaves the last three rows unwritten."""
    model, x = Experts(in_bf16 if dtype == torch.bfloat16 else None), draw(TOKENS, WIDTH)
    exact = stepped(lambda x: expert_by_expert(model, x), x, model)
    f = (lambda x: checkpoint(model, x, use_reentrant=False)) if again else model
    out, found, of_x = stepped(compiled(f, eager_backend("bf16")), x, model)
    assert not out[37:].any()
    assert not of_x[37:].any()
    for got, wanted in [(out, exact[0]), (of_x, exact[2]), *((found[n], exact[1][n]) for n in exact[1])]:
        assert (got - wanted).norm() / wanted.norm() < 2**-7


class ByHand(torch.autograd.Function):
    """A grouped product whose operands are rounded, one expert after the other, tokens padded by zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, fmt: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.fmt = fmt
        return grouped_mm(_along_last(x, fmt), _along_last(w.mT, fmt).mT, ENDS)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        of_x = grouped_mm(_along_last(g, ctx.fmt), _along_last(w, ctx.fmt).mT, ENDS)
        of_w = torch.zeros_like(w)
        for i, tokens in enumerate(experts_of()):
            rest = -(tokens.stop - tokens.start) % 32
            a, b = (F.pad(t[tokens], (0, 0, 0, rest)).mT for t in (x, g))
            of_w[i] = _along_last(a, ctx.fmt) @ _along_last(b, ctx.fmt).mT
        return of_x, of_w, None


def _along_last(x: Tensor, fmt: str) -> Tensor:
    return fxprec.quantize(x.contiguous(), fmt)


def test_operands_in_blocks_are_rounded_expert_by_expert() -> None:
    model, x = Experts(), draw(TOKENS, WIDTH)
    by_hand = Experts(lambda x, w, _: ByHand.apply(x, w, "mxfp8"))
    wanted, exact, of_x = stepped(by_hand, x, by_hand)
    operands = dict.fromkeys(("forward", "input_grad", "weight_grad"), "mxfp8")
    backend = eager_backend(recipe(**operands))
    out, found, got = stepped(compiled(model, backend), x, model)
    assert torch.equal(out, wanted)
    for a, b in [(got, of_x), *((found[n], exact[n]) for n in exact)]:
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6 * float(b.abs().max()))
    assert [(g.weight_grad, g.operands_why) for g in backend.plans[0].gemms] == [("mxfp8_e4m3", "")] * 2


def test_a_hadamard_matrix_cancels_in_each_expert() -> None:
    """Over the tokens of two experts it would not: the error would be 0.4."""
    model, x = Experts(), draw(TOKENS, WIDTH)
    exact = stepped(lambda x: expert_by_expert(model, x), x, model)[1]
    backend = eager_backend(recipe(weight_grad="e4m3fn/32:e8m0up", hadamard=True))
    found = stepped(compiled(model, backend), x, model)[1]
    for name, wanted in exact.items():
        assert (found[name] - wanted).norm() / wanted.norm() < 0.05


def test_rows_beyond_the_last_group_have_no_part_in_a_tensors_scale() -> None:
    x = draw(TOKENS, WIDTH)
    results = []
    for rest in (0.0, 1e30, torch.nan):
        model = Experts()
        x[37:] = rest
        out, found, _ = stepped(compiled(model, eager_backend(recipe(forward="nvfp4", weight_grad="nvfp4"))), x, model)
        results.append([out, *found.values()])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_inductor_runs_what_the_reference_does() -> None:
    x = draw(TOKENS, WIDTH)
    one, two = Experts(in_bf16), Experts(in_bf16)
    wanted = stepped(compiled(one, eager_backend("mxfp8")), x, one)
    found = stepped(compiled(two, eager_backend("mxfp8", lowering="auto")), x, two)
    for a, b in zip((found[0], *found[1].values(), found[2]), (wanted[0], *wanted[1].values(), wanted[2]), strict=True):
        assert (a - b).norm() / b.norm() < 0.02
