"""Under 16-bit recipes every GEMM multiplies 16-bit operands. Any CPU can: only its speed differs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from backend_helpers import eager_backend
from models import Apply, Parts
from processors import plan_on

import fxprec.driver.half_compilation
from fxprec.demo.models import CharTransformer
from fxprec.kernels.wide_gemms import WIDE
from fxprec.passes import narrow_gemms
from fxprec.passes.analysis import ops

pytestmark = pytest.mark.cpu_dependent


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Pretend this CPU has fast 16-bit GEMMs of any size, and collect the graphs that are lowered."""
    seen: list[torch.fx.GraphModule] = []
    lower = fxprec.driver.half_compilation.lower

    def spy(gm: torch.fx.GraphModule, *args, **options):
        seen.append(gm)
        return lower(gm, *args, **options)

    plan_on(monkeypatch, "avx512+bf16+fp16")
    monkeypatch.setattr(narrow_gemms, "SMALL", 0)
    monkeypatch.setattr(narrow_gemms, "SHORT", 0)
    monkeypatch.setattr(fxprec.driver.half_compilation, "lower", spy)
    return seen


def widened(gm: torch.fx.GraphModule) -> int:
    """Return how many GEMMs are computed in float32 by blocks; the graph has no other."""
    assert not operand_dtypes(gm)
    return sum(node.target in WIDE.values() for node in gm.graph.nodes)


def operand_dtypes(gm: torch.fx.GraphModule) -> list[set[torch.dtype]]:
    found = []
    for node in gm.graph.nodes:
        if node.target in ops.GEMM_OPERANDS:
            operands = [node.args[i] for i in ops.GEMM_OPERANDS[node.target]]
            found.append({a.meta["val"].dtype for a in operands})
    return found


def test_a_gemm_too_small_to_gain_stays_float32(graphs, monkeypatch) -> None:
    monkeypatch.setattr(narrow_gemms, "SMALL", 16 * 24 * 32)
    model = nn.Sequential(nn.Linear(24, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
    out = torch.compile(model, backend=eager_backend("native", recipe="bf16", low_ratio=None))(torch.randn(16, 24))
    out.sum().backward()
    forward, backward = (operand_dtypes(gm) for gm in graphs)
    assert forward == [{torch.bfloat16}, {torch.float32}]
    assert backward == [{torch.float32}, {torch.float32}, {torch.bfloat16}]


@pytest.mark.parametrize(("short", "dtype"), [(16, torch.bfloat16), (17, torch.float32)])
def test_attention_over_few_tokens_stays_float32_in_both_halves(graphs, monkeypatch, short, dtype) -> None:
    monkeypatch.setattr(narrow_gemms, "SHORT", short)
    attention = Apply(lambda q: nn.functional.scaled_dot_product_attention(q, q * 2, q + 1))
    q = torch.randn(2, 2, 16, 8, requires_grad=True)
    torch.compile(attention, backend=eager_backend("native", recipe="bf16", low_ratio=None))(q).sum().backward()
    assert [operand_dtypes(gm) for gm in graphs] == [[{dtype}], [{dtype}]]


def test_a_bf16_step_is_the_step_written_by_hand(graphs) -> None:
    model = nn.Sequential(nn.Linear(24, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
    x, weight1, weight2 = torch.randn(16, 24), *(p.detach().bfloat16() for p in model.parameters())
    out = torch.compile(model, backend=eager_backend("native", recipe="bf16", low_ratio=None))(x)
    out.backward(torch.ones_like(out))

    hidden = (x.bfloat16() @ weight1.t()).relu()
    wanted = hidden @ weight2.t()
    grad = torch.ones_like(wanted)
    grad_hidden = torch.where(hidden > 0, grad @ weight2, 0)
    assert torch.equal(out, wanted.float())
    assert torch.equal(model[2].weight.grad, (grad.t() @ hidden).float())
    assert torch.equal(model[0].weight.grad, (grad_hidden.t() @ x.bfloat16()).float())
    assert [operand_dtypes(gm) for gm in graphs] == [[{torch.bfloat16}] * 2, [{torch.bfloat16}] * 3]


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_every_gemm_of_a_transformer_is_narrow_and_gradients_stay_right(graphs, recipe: str) -> None:
    torch.manual_seed(0)
    model = CharTransformer(vocab=31, context=16, layers=1, width=32, heads=2)
    codes = torch.randint(0, 31, (4, 16))
    wanted = torch.autograd.grad(model(codes).square().mean(), list(model.parameters()))
    backend = eager_backend("native", recipe=recipe, low_ratio=0.5 if recipe == "fp8" else None)
    torch.compile(model, backend=backend)(codes).square().mean().backward()
    for dtypes in (d for gm in graphs for d in operand_dtypes(gm)):
        assert dtypes == {torch.bfloat16}
    assert len([d for gm in graphs for d in operand_dtypes(gm)]) == 6 + 11, "attention's backward is one"
    error = max((p.grad - w).norm() / w.norm() for p, w in zip(model.parameters(), wanted, strict=True))
    assert error < (0.02 if recipe == "bf16" else 0.3)


def test_operands_that_are_narrow_already_are_not_converted(graphs) -> None:
    """Attention's backward of a bf16 model reads a float32 gradient beside bf16 factors, which are views of one GEMM."""
    torch.manual_seed(0)
    model = CharTransformer(vocab=31, context=16, layers=1, width=32, heads=2).bfloat16()
    compiled = torch.compile(model, backend=eager_backend("native", recipe="fp8", low_ratio=None))
    compiled(torch.randint(0, 31, (4, 16))).float().sum().backward()
    conversions = [n for gm in graphs for n in gm.graph.nodes if n.target is ops.CONVERT]
    same = [n for n in conversions if n.all_input_nodes[0].meta["val"].dtype == n.meta["val"].dtype]
    assert conversions
    assert not same


def test_where_a_cpu_has_no_16_bit_gemm_a_16_bit_model_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_on(monkeypatch, "avx512")
    model = CharTransformer(vocab=31, context=16, layers=1, width=32, heads=2).bfloat16()
    codes = torch.randint(0, 31, (4, 16))
    wanted = torch.autograd.grad(model(codes).square().mean(), list(model.parameters()))
    torch.compile(model, backend=eager_backend("native", recipe="bf16", low_ratio=None))(
        codes
    ).square().mean().backward()
    for p, w in zip(model.parameters(), wanted, strict=True):
        assert p.grad.dtype == torch.bfloat16
        assert (p.grad - w).norm() / w.norm() < 0.02


def test_fp16_narrows_the_forward_half_only(graphs) -> None:
    """An unscaled gradient underflows in float16, so backward GEMMs stay wide."""
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))
    out = torch.compile(model, backend=eager_backend("native", recipe="fp16", low_ratio=None))(torch.randn(16, 24))
    out.sum().backward()
    assert [operand_dtypes(gm) for gm in graphs] == [[{torch.float16}] * 2, [{torch.float32}] * 3]


@pytest.mark.parametrize("strict", [False, True])
def test_a_cpu_without_16_bit_gemms_is_no_failure_and_no_warning(graphs, monkeypatch, caplog, strict: bool) -> None:
    """It is said in each plan, as an event of each backend, and in the log at level INFO: numbers and bytes are as asked."""
    caplog.set_level("INFO", logger="fxprec")
    plan_on(monkeypatch, "avx512")
    words = "the CPU has no torch.bfloat16 GEMM: GEMMs read and write torch.bfloat16, and multiply in float32, block by block"
    for _ in range(2):
        torch.compiler.reset()
        backend = eager_backend("native", recipe="bf16", low_ratio=None, strict=strict)
        torch.compile(nn.Linear(4, 4), backend=backend)(torch.randn(2, 4)).sum().backward()
        assert [(e.kind, e.site, e.detail) for e in backend.events] == [("machine", "narrow-gemms", words)]
        assert backend.plans[0].notes == (f"narrow-gemms: {words}",)
    said = [r.levelname for r in caplog.records if words in r.getMessage()]
    assert said == ["INFO", "INFO"], "one a backend"


def test_a_cpu_that_was_asked_for_is_a_note_of_the_plan_alone(graphs, caplog) -> None:
    caplog.set_level("INFO", logger="fxprec")
    backend = eager_backend("native", recipe="bf16", low_ratio=None, cpu="avx2")
    torch.compile(nn.Linear(4, 4), backend=backend)(torch.randn(2, 4)).sum().backward()
    assert [widened(gm) for gm in graphs] == [1, 1]
    assert not backend.events
    assert not [r for r in caplog.records if "the CPU has no" in r.getMessage()]
    assert "the CPU has no torch.bfloat16 GEMM" in backend.plans[0].notes[0]


def test_without_a_processor_gemms_stay_float32(graphs) -> None:
    """So no GEMM rounds, and what a stored copy does is not hidden by it."""
    backend = eager_backend("native", recipe="bf16", low_ratio=None, cpu="portable")
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()
    torch.compile(model, backend=backend)(torch.randn(16, 24).bfloat16()).sum().backward()
    assert [operand_dtypes(gm) for gm in graphs] == [[{torch.float32}] * 2, [{torch.float32}] * 3]
    assert not backend.events


def test_a_graph_without_gemms_says_nothing(graphs, monkeypatch) -> None:
    plan_on(monkeypatch, "avx2")
    backend = eager_backend("native", recipe="bf16", low_ratio=None)
    torch.compile(nn.GELU(), backend=backend)(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert not backend.events


def test_a_bf16_model_computes_its_gemms_in_float32_there(graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_on(monkeypatch, "avx512")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8, bias=False)).bfloat16()
    x = torch.randn(16, 24, dtype=torch.bfloat16)
    out = torch.compile(model, backend=eager_backend("native", recipe="bf16-pure", low_ratio=None))(x)
    out.backward(torch.ones_like(out))
    wide = [p.detach().float() for p in model.parameters()]
    hidden = torch.addmm(wide[1], x.float(), wide[0].t()).bfloat16().relu()
    assert torch.equal(out, (hidden.float() @ wide[2].t()).bfloat16())
    assert torch.equal(model[2].weight.grad, (torch.ones(8, 16) @ hidden.float()).bfloat16())
    assert [widened(gm) for gm in graphs] == [2, 3]


@pytest.mark.parametrize("has_gemm", [True, False])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.bfloat16])
def test_attention_reads_its_mask_in_the_dtype_it_computes_in(graphs, monkeypatch, has_gemm, mask_dtype) -> None:
    """The mask of a CPU's attention is a keyword; bfloat16 autocast makes it bfloat16."""
    plan_on(monkeypatch, "avx512+bf16" if has_gemm else "avx512")
    torch.manual_seed(0)
    q = torch.randn(2, 4, 16, 8, dtype=torch.bfloat16, requires_grad=True)
    allowed = torch.rand(2, 1, 16, 16) > 0.3
    allowed[..., 0] = True
    added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min).bfloat16()
    mask = allowed if mask_dtype == torch.bool else added

    def attend(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, q * 2, q + 1, attn_mask=mask)

    out = torch.compile(attend, backend=eager_backend("native", recipe="bf16", low_ratio=None))(q, mask)
    (grad,) = torch.autograd.grad(out.float().square().sum(), q)
    plain, exact = (_output_and_gradient(attend, q.detach().to(d), allowed) for d in (torch.bfloat16, torch.float64))
    for got, eager, wanted in zip((out, grad), plain, exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - wanted).norm() < 1.1 * (eager.double() - wanted).norm()
    if has_gemm:
        assert [operand_dtypes(gm) for gm in graphs] == [[{torch.bfloat16}]] * 2
    else:
        assert [widened(gm) for gm in graphs] == [1, 1]


def _output_and_gradient(attend, q: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = attend(q.requires_grad_(), mask)
    return out, torch.autograd.grad(out.to(torch.promote_types(out.dtype, torch.float32)).square().sum(), q)[0]


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_a_float32_mask_is_not_rounded(graphs, recipe: str) -> None:
    """A distance added to scores (ALiBi) keeps its bits, and float32's least number is no number of float16."""
    q = torch.randn(2, 4, 16, 8)
    distance = -torch.arange(16.0)[:, None].sub(torch.arange(16.0)).abs() / 3

    def attend(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, q * 2, q + 1, attn_mask=mask)

    torch.compile(attend, backend=eager_backend("native", recipe=recipe, low_ratio=None))(q, distance)
    (attention,) = [n for n in graphs[0].graph.nodes if n.target in ops.ATTENTION]
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[recipe]
    assert attention.args[0].meta["val"].dtype == narrow
    assert attention.kwargs["attn_mask"].meta["val"].dtype == torch.float32


def _inverse(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(torch.diag_embed(1 + x.sum(1).square())) * y.sum()


@pytest.mark.parametrize(("method", "products"), [(torch.cdist, 3), (_inverse, 2)], ids=["cdist", "inverse"])
def test_a_method_that_autocast_runs_in_float32_is_no_worse_than_there(graphs, method, products: int) -> None:
    """Distances of near points are differences of squares: rounded to 16 bits, nothing of their gradients was right."""
    torch.manual_seed(0)
    model = Parts(lambda m, x, y: method(m.first(x), m.first(y)).log1p().sum(), first=nn.Linear(32, 32))
    x = torch.randn(64, 32)
    y = x + 0.02 * torch.randn(64, 32)

    def gradient(run, *, autocast: bool = False) -> torch.Tensor:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = run(x, y)
        loss.backward()
        return model.first.weight.grad.clone()

    wanted = gradient(model)
    rival = gradient(model, autocast=True)
    found = gradient(torch.compile(model, backend=eager_backend("native", recipe="bf16", low_ratio=None)))
    assert (found - wanted).norm() <= 1.1 * (rival - wanted).norm()
    in_float32 = [dtypes for gm in graphs for dtypes in operand_dtypes(gm) if dtypes == {torch.float32}]
    assert len(in_float32) == products, "and the linear layers in bfloat16"


class _Attention(nn.Module):
    """Attention of three dimensions, which no kernel takes, or the same formula written out."""

    def __init__(self, written_out: bool, mask: torch.Tensor) -> None:
        super().__init__()
        self.written_out, self.mask = written_out, mask
        self.first = nn.Linear(16, 3 * 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.first(x).chunk(3, -1)
        if self.written_out:
            return (q @ k.mT * 0.25 + self.mask).softmax(-1) @ v
        return nn.functional.scaled_dot_product_attention(q, k, v, self.mask)


@pytest.mark.parametrize("written_out", [False, True], ids=["scaled_dot_product_attention", "written out"])
def test_scores_of_attention_without_a_kernel_are_float32_as_under_autocast(graphs, written_out: bool) -> None:
    """Rounded to 16 bits, scores of tens changed outputs by seven times what autocast's rounding of q and k does."""
    torch.manual_seed(0)
    mask = torch.zeros(32, 32).masked_fill(torch.rand(32, 32) < 0.3, float("-inf")).fill_diagonal_(0.0)
    model, x = _Attention(written_out, mask), 16 * torch.randn(4, 32, 16)
    wanted = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        rival = model(x)
    compiled = torch.compile(model, backend=eager_backend("native", recipe="bf16", low_ratio=None))
    found = compiled(x)
    found.sum().backward()
    in_float32 = [dtypes for gm in graphs for dtypes in operand_dtypes(gm) if dtypes == {torch.float32}]
    assert len(in_float32) == (0 if written_out else 1)
    assert (found - wanted).norm() <= 1.1 * (rival - wanted).norm()
