"""GEMMs over stored codes: found, weighed, rewritten; the same bits as decoding first. Any device can: only speed differs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import assert_bits_equal, leave_out, recorded_works
from op_by_op import run_op_by_op
from processors import plan_on

import fxprec.driver.compilation
from fxprec.ir import symbolic
from fxprec.ir.symbolic import CodedGemm
from fxprec.passes.analysis import gemm_costs
from fxprec.passes.analysis.coded_gemms import coded
from fxprec.passes.analysis.gemm_costs import Costs, Gpu, Product
from fxprec.passes.weigh_gemms import weigh

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0))
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0))
aten = torch.ops.aten


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Pretend this is an H100 whose library calls run here, without code generation; collect the lowered graphs."""
    seen: list[torch.fx.GraphModule] = []

    monkeypatch.setattr(gemm_costs, "gpu_of", lambda device: H100)
    plan_on(monkeypatch, "avx512+bf16+fp16")
    monkeypatch.setattr(fxprec.driver.compilation.compat, "compile_fx_inner", run_op_by_op(seen))
    return seen


def network(act: type[nn.Module] = nn.GELU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), act(), nn.Linear(64, 48))


def step(model: nn.Module, shape: tuple[int, ...] = (4, 16, 32), loud: float = 1.0, **options: Any):
    """One training step; (output and gradients, backend)."""
    torch.compiler.reset()
    torch.manual_seed(1)
    dynamic = options.pop("dynamic", False)
    defaults = {"recipe": "fp8", "low_ratio": 1.0, "promote_above": None, "gemms": "low"}
    backend = fxprec.Backend(fxprec.Config(**{**defaults, **options}))
    x = torch.randn(shape, requires_grad=True)
    out = torch.compile(model, backend=backend, dynamic=dynamic)(x)
    weight = torch.randn(out.shape)
    weight.view(-1)[3] *= loud
    (out * weight).sum().backward()
    found = [out.detach(), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found, backend


def calls(gm: torch.fx.GraphModule, target: object) -> list[torch.fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def saved_bytes(model: nn.Module, **options: Any) -> int:
    held: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        step(model, **options)
    return sum(t.untyped_storage().nbytes() for t in held.values() if t.itemsize == 1)


@pytest.mark.parametrize(
    ("recipe", "storage", "act", "decodes_alike"),
    [
        ("fp8", "native", nn.ReLU, False),
        ("fp8", "packed", nn.GELU, True),
        ("hfp8", "packed", nn.ReLU, True),
        pytest.param("fp8", "native", nn.ReLU, True, marks=pytest.mark.full),
        pytest.param("fp8", "packed", nn.GELU, False, marks=pytest.mark.full),
        pytest.param("hfp8", "packed", nn.ReLU, False, marks=pytest.mark.full),
    ],
)
def test_a_step_over_codes_has_the_bits_of_the_decoded_step(
    graphs, monkeypatch, recipe: str, storage: str, act, decodes_alike: bool
) -> None:
    """`torch._scaled_mm` on this CPU, and the eager reference, against decoding and multiplying.

    A GEMM that decodes multiplies the values. Only without compute-high does it multiply the numbers that are stored.
    """
    if decodes_alike:
        leave_out(monkeypatch, "compute-high", "choose-crossings")
    options = {"recipe": recipe, "storage": storage}
    found, backend = step(network(act), **options)
    products = [n for gm in graphs for n in calls(gm, aten._scaled_mm.default)]
    wanted, _ = step(network(act), **options, gemms="high")
    eager, _ = step(network(act), **options, lowering="eager")
    for a, b, c in zip(found, wanted, eager, strict=True):
        assert_bits_equal(a, c)
        if decodes_alike:
            assert_bits_equal(c, b)
    assert [g.pays for g in backend.plans[0].gemms] == [True, True]
    if recipe == "fp8":
        assert len(products) == 6, "two layers of three GEMMs"
    else:
        assert not products, "no hardware multiplies the papers' formats"
    for node in products:
        a, b = node.args[:2]
        assert (a.meta["val"].stride(1), b.meta["val"].stride(0)) == (1, 1), "both along the summed dimension"


def test_what_is_in_blocks_is_decoded_for_a_gemm() -> None:
    graph = torch.fx.Graph()
    q, table = graph.placeholder("q"), graph.placeholder("table")
    read = symbolic.Dequantize(q, table, 0, "int8", "packed", torch.float32, 512).insert(graph)
    assert coded(read) == "an operand is not stored in a planned format"


class Attention(nn.Module):
    """(batch, tokens, 32) to the same: two heads, q, k and v of one layer or of three, grouped or not."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.widths = (32, 16, 16) if grouped else (32, 32, 32)
        self.qkv, self.out = nn.Linear(32, sum(self.widths), bias=False), nn.Linear(32, 32, bias=False)
        self.grouped = grouped

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        if self.grouped:
            heads = [y.view(batch, tokens, -1, 16).transpose(1, 2) for y in self.qkv(x).split(self.widths, -1)]
        else:
            heads = self.qkv(x).view(batch, tokens, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind()
        q, k, v = heads
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.out(attended.transpose(1, 2).reshape(batch, tokens, width))


@pytest.mark.filterwarnings("ignore:weigh-gemms")  # attention itself has no kernel for codes
@pytest.mark.parametrize("grouped", [True, pytest.param(False, marks=pytest.mark.full)])
def test_all_linear_layers_beside_attention_multiply_codes(graphs, grouped: bool) -> None:
    """Attention's result and its gradients come as heads, of another layout: they are cast where they are matrices."""
    torch.manual_seed(0)
    model = Attention(grouped)
    found, backend = step(model, shape=(2, 16, 32))
    assert sum(len(calls(gm, aten._scaled_mm.default)) for gm in graphs) == 6, "two layers of three GEMMs"
    assert not any("decoded:" in gemm.why for gemm in backend.plans[0].gemms)
    eager, _ = step(model, shape=(2, 16, 32), lowering="eager")
    for a, c in zip(found, eager, strict=True):
        assert_bits_equal(a, c)


@pytest.mark.parametrize("act", [nn.GELU, nn.ReLU])
def test_each_operand_is_transposed_once_and_only_that_copy_is_saved(graphs, act) -> None:
    """ReLU's backward reads a mask, since codes round small values to 0.

    Where no GEMM multiplies codes, GELU's result is recomputed.
    """
    with recorded_works() as works:
        low = saved_bytes(network(act), lowering="eager")
    nodes = works[0].joint.graph.nodes
    copied = [n.args[0].name for n in nodes if n.target is symbolic.TRANSPOSED]
    assert len(copied) == len(set(copied)) == 6, "x, W and dy of two layers"
    more = 4 * 16 * 64 if act is nn.GELU else 4 * 16 * 64 // 8
    assert low == saved_bytes(network(act), lowering="eager", gemms="high") + more


def test_only_what_a_gemm_multiplies_in_codes_is_rounded_for_it(graphs, tmp_path) -> None:
    """Of a network whose first layer multiplies codes, and whose second decodes."""
    _, backend = step(network(), gemms="low", lowering="eager")
    plan = backend.plans[0]
    assert {s.reads for s in plan.sites if s.tensor in ("x", "0.weight", "2.weight")} == {"gemm codes"}
    assert {s.reads for s in plan.sites if s.kind == "grad_output"} == {"gemm codes"}
    path = tmp_path / "plan.json"
    edited = fxprec_dumps(plan)
    path.write_text('"pays": false'.join(edited.rsplit('"pays": true', 1)))
    _, backend = step(network(), gemms="auto", lowering="eager", plan=str(path), low_ratio=None)
    plan = backend.plans[0]
    assert [g.pays for g in plan.gemms] == [True, False]
    found = {(s.tensor, s.kind): (s.format, s.reads) for s in plan.sites}
    first, second = sorted(s.tensor for s in plan.sites if s.kind == "grad_output")
    low = {("0.weight", "param"): ("e4m3fn", "gemm codes"), (first, "grad_output"): ("e5m2_sat", "gemm codes")}
    high = {("2.weight", "param"): ("bf16", "all"), (second, "grad_output"): ("bf16", "all")}
    assert found.items() >= {**low, **high}.items()


@pytest.mark.parametrize(
    ("recipe", "storage", "gradients"), [("fp8", "native", "e5m2_sat"), ("hfp8", "packed", "1-5-2:fn")]
)
def test_a_gradient_keeps_its_infinity_in_codes(graphs, recipe: str, storage: str, gradients: str) -> None:
    """e5m2_sat saturates; without the guard 57344 would come out of the GEMM. 1-5-2 spares its last code for it."""
    for lowering in ("auto", "eager"):
        options = {"recipe": recipe, "storage": storage, "lowering": lowering}
        found, backend = step(network(), loud=torch.inf, **options)
        read = {(s.format, s.reads) for s in backend.plans[0].sites if s.kind == "grad_output"}
        assert read == {(gradients, "gemm codes")}
        wanted, _ = step(network(), loud=torch.inf, **options, gemms="high")
        assert not found[1].isfinite().all()
        for a, b in zip(found[1:], wanted[1:], strict=True):
            assert torch.equal(a.isfinite(), b.isfinite())


def test_forward_adds_up_fast_and_gradients_exactly_unless_asked_otherwise(graphs) -> None:
    for asked, wanted in ((None, [False] * 4 + [True] * 2), (False, [False] * 6), (True, [True] * 6)):
        graphs.clear()
        step(network(), fast_accum=asked)
        products = [n for gm in graphs for n in calls(gm, aten._scaled_mm.default)]
        assert sorted(n.args[7] for n in products) == wanted
        assert all(n.args[7] for n in calls(graphs[0], aten._scaled_mm.default)) == (asked is not False)


def test_under_a_dynamic_batch_only_what_sums_over_it_is_not_native(graphs, monkeypatch) -> None:
    """dW sums over the rows, whose number no kernel may assume to be a multiple of 16."""
    leave_out(monkeypatch, "compute-high", "choose-crossings")
    with recorded_works() as works:
        found, _ = step(network(), shape=(48, 32), dynamic=True)
    kernels = [call.kernel for _, call in CodedGemm.among(works[0].joint.graph.nodes)]
    assert sorted(kernels) == ["generated"] * 2 + ["native"] * 4
    for a, b in zip(found, step(network(), shape=(48, 32), gemms="high")[0], strict=True):
        assert_bits_equal(a, b)


@pytest.mark.parametrize(
    ("model", "shape", "options", "words"),
    [
        (lambda: nn.Linear(20, 32), (16, 20), {}, "3 GEMMs over codes 45 us, decoded 20 us (estimate)"),
        (lambda: nn.Conv2d(16, 16, 3), (2, 16, 8, 8), {}, "aten.convolution has no kernel for codes"),
        (lambda: nn.Linear(32, 32), (16, 32), {"recipe": "bf16", "low_ratio": None}, "operands are bf16 and bf16"),
    ],
)
def test_the_plan_says_why_a_gemm_stays_high(graphs, model, shape, options, words: str) -> None:
    _, backend = step(model(), shape, **{"gemms": "auto", "lowering": "eager", **options})
    (gemm,) = backend.plans[0].gemms
    assert gemm.pays is False
    assert words in gemm.why


def test_the_cost_model_leaves_small_layers_high_and_takes_large_ones() -> None:
    costs = gemm_costs.costs_of(H100)

    def layer(tokens: int, width: int, rates: Costs = costs, kernel: str = "native"):
        x, w = tokens * width, width**2
        copies = ((), (w,), (x, x)) if kernel == "native" else ((), (), ())
        decodes, written = ((), (w,), (x,)), (x + w, x, 0)
        sizes = ((tokens, width, width), (tokens, width, width), (width, width, tokens))
        return weigh(
            [Product(*s, kernel, *p) for s, p in zip(sizes, zip(copies, decodes, written, strict=True), strict=True)],
            rates,
        )

    assert layer(8192, 4096).pays is True
    assert layer(64, 64).pays is False
    assert "3 GEMMs over codes" in layer(64, 64).why
    assert "(estimate)" in layer(64, 64).why, "nothing is measured yet"
    a100 = gemm_costs.costs_of(A100)
    assert a100.fp8_flop_per_s is None
    assert layer(8192, 4096, a100, "generated").pays is False, "0.6 of the rate, and decoding is cheap beside it"


@pytest.mark.parametrize(
    ("name", "capability", "figures"),
    [
        ("NVIDIA GeForce RTX 4090", (8, 9), "L40S"),
        ("NVIDIA GeForce RTX 5090", (12, 0), "L40S"),
        ("NVIDIA A10", (8, 6), "L40S"),
        ("NVIDIA H20", (9, 0), "H100"),
        ("NVIDIA GH200 480GB", (9, 0), "H100"),
        ("NVIDIA B300 SXM6", (10, 3), "B200"),
    ],
)
def test_another_gpus_figures_name_that_gpu(name: str, capability: tuple[int, int], figures: str) -> None:
    """Those of a B200 were taken for an RTX 5090, of an A100 for an A10, and nothing said so."""
    costs = gemm_costs.costs_of(Gpu(name, capability))
    assert costs.source == f"estimate by figures of {figures}"
    assert costs.bytes_per_s == gemm_costs.costs_of(Gpu(figures, capability)).bytes_per_s
    assert (costs.fp8_flop_per_s is None) == (capability < (8, 9))


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA H200"])
def test_a_gpu_with_figures_has_its_own(name: str) -> None:
    source = "measured" if name.endswith("H200") else "estimate"
    assert gemm_costs.costs_of(Gpu(name, (9, 0))).source == source


def test_a_persons_word_goes_first_and_survives_the_plan_file(graphs, tmp_path) -> None:
    _, backend = step(network(), gemms="auto", lowering="eager")
    assert [g.pays for g in backend.plans[0].gemms] == [False, False], "too small to gain"
    path = tmp_path / "plan.json"
    path.write_text(fxprec_dumps(backend.plans[0]).replace('"pays": false', '"pays": true', 1))
    plan = fxprec.Plan.load(path)
    assert [g.pays for g in plan.gemms] == [True, False]
    _, backend = step(network(), gemms="auto", lowering="eager", plan=str(path), low_ratio=None)
    first, second = backend.plans[0].gemms
    assert (first.pays, first.why) == (True, "as the given plan says")
    assert second.pays is False


def fxprec_dumps(plan: fxprec.Plan) -> str:
    from fxprec.plan.files import dumps

    return dumps(plan)


def test_what_cannot_be_had_is_said(graphs) -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 1), nn.Flatten(), nn.Linear(16, 32))
    words = r"gemms='low', but 1 of 2 GEMMs decode their operands: aten\.convolution has no kernel for codes"
    with pytest.warns(fxprec.FxprecWarning, match=words):
        _, backend = step(model, (16, 16, 1, 1), lowering="eager")
    assert [e.kind for e in backend.events if e.kind != "scale"] == ["fallback"]
    assert "1 of 3 decoded" not in backend.plans[0].gemms[1].why


@pytest.mark.cpu_dependent
@pytest.mark.parametrize("cpu", ["avx512+bf16", "avx2", None])
def test_on_a_cpu_nobody_asks_and_nothing_changes(cpu: str | None) -> None:
    with recorded_works() as works:
        _, backend = step(network(), lowering="eager", gemms="auto", cpu=cpu)
    assert {(g.pays, g.why) for g in backend.plans[0].gemms} == {(None, "not estimated on cpu")}
    assert not [n for n in works[0].joint.graph.nodes if n.target is symbolic.GEMM]
