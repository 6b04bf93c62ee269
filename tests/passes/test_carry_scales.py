"""The pass carry-scales: every gradient carries the power of two the table says, and is unscaled where it leaves."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import pytest
import torch
import torch.nn.functional as F
from models import Apply
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from helpers import assert_bits_equal, compiled, eager_backend
from scale_helpers import IDENTITY, Joint, Recording, joint_of, scaled_identity
from test_casts_simulated import CNN, Program, Transformer

from fxprec.config.recipes import HFP8, Recipe
from fxprec.ir import symbolic
from fxprec.passes.analysis.joint import is_backward
from fxprec.passes.analysis.producers import producer_of
from fxprec.plan.scales import Cast, GradientGemm, Join

Made = TypeVar("Made")


def inputs(joint: Joint, model: nn.Module, args: tuple[torch.Tensor, ...], exps: list[int], dtype: torch.dtype):
    """Values for the joint graph's placeholders: what Dynamo lifted, by shape and order, then tangents."""
    given = iter([*args, *(t for t in (*model.parameters(), *model.buffers()))])
    pool = [t.detach() for t in given]
    values = []
    for node in joint.plain.find_nodes(op="placeholder"):
        val = node.meta["val"]
        if val.dtype == torch.int32 and val.dim() == 2 and val.shape[1] == symbolic.TABLE_COLUMNS:
            values.append(joint.table(exps))
        elif "tangent" in node.name:
            values.append(
                torch.linspace(-1, 2, val.numel(), dtype=dtype).view(val.shape)
                if val.dim()
                else torch.ones((), dtype=dtype)
            )
        else:
            at = next(i for i, t in enumerate(pool) if t.shape == val.shape and t.dtype == val.dtype)
            taken = pool.pop(at)
            values.append(taken.to(dtype) if taken.is_floating_point() else taken)
    return values


def in_float32(make: Callable[[], Made]) -> Made:
    """What ``make`` returns, of float32 whatever torch's default dtype is: the bounds below are float32's."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return make()
    finally:
        torch.set_default_dtype(default)


def run(joint: Joint, graph, values, given=None) -> Recording:
    recording = Recording(graph, joint.root, given)
    with torch.no_grad():
        recording.run(*values)
    return recording


def without_casts(graph: torch.fx.Graph) -> torch.fx.Graph:
    """The same graph, casts taken out: plain ATen, which runs in float64 too."""
    bare = torch.fx.Graph()
    bare.output(bare.graph_copy(graph, {}))
    for node in list(bare.nodes):
        if node.target in (symbolic.QUANTIZE, symbolic.DEQUANTIZE, symbolic.KEEP_NONFINITE):
            node.replace_all_uses_with(node.args[0])
            bare.erase_node(node)
        elif node.kwargs.get("dtype") is torch.float32:
            node.kwargs = {**node.kwargs, "dtype": torch.float64}
    return bare


def is_float32(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def depends_on_tangents(node: torch.fx.Node) -> bool:
    return is_backward(node) or any("tangent" in n.name or depends_on_tangents(n) for n in node.all_input_nodes)


def check_every_gradient(joint: Joint, model: nn.Module, args: tuple[torch.Tensor, ...], seed: int) -> int:
    """Compare each carried node with the float64 gradient times 2**exponent; return how many there were."""
    exps = joint.random_exps(seed)
    got = run(joint, joint.scaled, inputs(joint, model, args, exps, torch.float32)).values
    forward = {  # the same values, so that no ReLU decides otherwise
        node.name: got[node.name].double()
        for node in joint.plain.nodes
        if node.op == "call_function" and not depends_on_tangents(node) and is_float32(got.get(node.name))
    }
    wide = run(joint, without_casts(joint.plain), inputs(joint, model, args, exps, torch.float64), forward).values
    checked = 0
    for node in joint.scaled.nodes:
        variable, value = joint.carried.get(node.name), got[node.name]
        if variable is None or node.name not in wide or not isinstance(value, torch.Tensor):
            continue
        wanted = wide[node.name] * 2.0 ** exps[variable]
        largest = float(wanted.abs().max())
        tolerance = 1e-5 * max(largest, 0.1 * 2.0 ** exps[variable])  # sums of gradients near 1 may cancel
        assert float((value.double() - wanted).abs().max()) <= tolerance, (node.name, exps[variable])
        checked += largest > 1e-3 * 2.0 ** exps[variable]
    for out, plain in zip(joint.scaled.output_node().args[0], wide["output"], strict=True):
        if isinstance(out, torch.fx.Node) and isinstance(plain, torch.Tensor):
            assert out.name not in joint.carried, "what leaves the graph carries no scale"
            error = float((got[out.name].double() - plain).abs().max())
            assert error <= 1e-5 * max(float(plain.abs().max()), 1e-6), out.name
    return checked


@pytest.mark.parametrize("first", [0, 25, *(pytest.param(n, marks=pytest.mark.full) for n in range(50, 200, 25))])
def test_every_intermediate_gradient_carries_its_scale(first: int) -> None:
    """Random programs with branches, splits and concats, random exponents from -40 to 40; 50 of 200 in the gate."""
    checked = 0
    with scaled_identity():
        for seed in range(first, first + 25):
            torch.manual_seed(seed)
            model, x = in_float32(lambda seed=seed: (Program(seed, length=3 + seed % 4), torch.randn(4, 6)))
            joint = joint_of(model, x)
            assert joint.remarks == [], "every operator is known"
            checked += check_every_gradient(joint, model, (x,), seed)
    assert checked > 25, checked


class TwoLosses(nn.Module):
    """Two heads on one trunk; two losses come back, the second one detached from half of the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.gelu(self.trunk(x))
        return F.cross_entropy(self.left(h), y), self.right(torch.dropout(h, 0.0, True)).square().mean()


class Shapes(nn.Module):
    """Operators that move or pool: padding, pooling, upsampling, norms, indexing, reductions, softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.group, self.norm = nn.GroupNorm(2, 8), nn.LayerNorm(8)
        self.out = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.group(self.conv(F.pad(x, (1, 0, 0, 1)))))
        a = F.max_pool2d(h, 2)
        b = F.avg_pool2d(h[:, :, :8, :8], 2)
        h = self.up(a[:, :, :4, :4] + b) * torch.sigmoid(F.interpolate(b, scale_factor=2))
        rows = self.norm(h.flatten(2).transpose(1, 2))
        rows = torch.stack([rows[:, ::2], rows[:, 1::2]], dim=1).flatten(1, 2)
        rows = rows[:, torch.tensor([3, 1, 1, 7])].cumsum(1) / (1 + rows.var(dim=1, keepdim=True))
        return F.nll_loss(F.log_softmax(self.out(rows.mean(1)), -1), y) + F.adaptive_avg_pool2d(h, 1).tanh().sum()


BUDGET = {"storage": "packed", "peak_budget": "100%", "low_ratio": None}


def examples() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
    codes = torch.randint(11, (3, 6))
    return {
        "cnn": (CNN(), (images, labels)),
        "transformer": (Transformer(explicit=False), (codes, codes.flip(0))),
        "explicit attention": (Transformer(explicit=True), (codes, codes.flip(0))),
        "two losses": (TwoLosses(), (torch.randn(6, 8), torch.randint(4, (6,)))),
        "shapes": (Shapes(), (torch.randn(2, 3, 8, 8), torch.randint(5, (2,)))),
    }


@pytest.mark.parametrize(
    "options", [{"storage": "simulate"}, {"storage": "packed"}, BUDGET], ids=["simulate", "packed", "budget"]
)
@pytest.mark.parametrize("name", list(examples()))
def test_rescaling_alone_changes_no_bit_of_what_leaves(name: str, options: dict[str, Any]) -> None:
    """Powers of two in float32: parameter gradients are those without scaling, whatever the exponents."""
    model, args = in_float32(examples)[name]
    with scaled_identity():
        joint = joint_of(model, *args, **options)
    assert [text for text in joint.remarks if not text.startswith("peak budget")] == []
    assert any(isinstance(v, Join) for v in joint.scales.variables) or name == "explicit attention", (
        "gradients are summed"
    )
    plain = run(joint, joint.plain, inputs(joint, model, args, [0] * len(joint.scales.variables), torch.float32))
    for seed in range(3):
        exps = joint.random_exps(seed)
        assert max(map(abs, exps)) > 20
        got = run(joint, joint.scaled, inputs(joint, model, args, exps, torch.float32))
        for i, (a, b) in enumerate(zip(got.values["output"], plain.values["output"], strict=True)):
            if isinstance(a, torch.Tensor):
                assert_bits_equal(a, b, f"{name}: output {i}")
        assert sum(isinstance(a, torch.Tensor) for a in got.values["output"]) > 4


@pytest.mark.parametrize("storage", ["simulate", "packed"])
def test_producers_are_recognised(storage: str) -> None:
    """One GEMM stands behind a mask, one behind a softmax."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.LogSoftmax(1))
    joint = joint_of(model, torch.randn(2, 3, 8, 8), recipe=HFP8, storage=storage)
    sites = joint.plan.sites
    casts = {sites[v.site].tensor: v for v in joint.scales.variables if isinstance(v, Cast) and v.row == v.site}
    assert casts["convolution_1"].producer == "softmax"
    made = casts["relu"] if storage == "simulate" else casts["convolution"]
    assert made.producer == "gemm"
    weight = next(s for s in sites if s.tensor == "2.weight")
    assert made.gemm == GradientGemm(length=4 * 9, gradient=casts["convolution_1"].row, operand=weight.id)


@pytest.mark.parametrize(("fmt", "producer"), [("1-4-3+4", "gemm"), ("int8", "other")])
def test_a_gemms_operand_in_blocks_says_nothing_of_its_product(fmt: str, producer: str) -> None:
    """Nobody counts what is in blocks, and the scale of the product follows what is counted of both operands."""
    graph = torch.fx.Graph()
    gradient, x, table = (graph.placeholder(name) for name in ("gradient", "x", "table"))
    stored = [
        symbolic.Quantize(gradient, table, 1, "1-5-2", "packed").insert(graph),
        symbolic.Quantize(x, table, 0, fmt, "packed").insert(graph),
    ]
    formats = ("1-5-2", fmt)
    read = [
        symbolic.Dequantize(q, table, symbolic.AS_STORED, f, "packed", torch.float32, 32 if f == "int8" else 0)
        for q, f in zip(stored, formats, strict=True)
    ]
    factors = [
        graph.call_function(torch.ops.aten.view.default, (call.insert(graph), list(shape)))
        for call, shape in zip(read, ((8, 4), (4, 8)), strict=True)
    ]
    factors[0].meta["val"] = torch.empty(8, 4)
    product = graph.call_function(torch.ops.aten.mm.default, tuple(factors))
    assert producer_of(product, SimpleNamespace(of_backward_node={}), {stored[0]: 1})[0] == producer


def test_scales_come_off_in_the_decode_of_a_gemm_where_there_is_one() -> None:
    """Packed: dW = (X / a)^T (a dZ), and no pass over dW."""
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    joint = joint_of(model, torch.randn(32, 8), recipe=HFP8, storage="packed")
    slots = {slot.row for slot in joint.scales.slots}
    divided = [n for n in joint.scaled.find_nodes(op="call_function", target=symbolic.DEQUANTIZE) if n.args[2] in slots]
    assert len(divided) == 2, "one for each weight gradient"
    leaving = [n for n in joint.scaled.output_node().args[0] if isinstance(n, torch.fx.Node)]
    for node in leaving:
        while node.target is torch.ops.aten.permute.default:
            node = node.args[0]
        assert not (node.target is symbolic.RESCALE and node.args[0].target is torch.ops.aten.mm.default)


class Vanishing(nn.Module):
    """A random program over values of shape (4, 6) with factors of zero at random places."""

    OPERATIONS: ClassVar[dict[str, Callable[..., torch.Tensor]]] = {
        "mm": lambda a, b, w: a @ w,
        "add": lambda a, b, w: a + b,
        "gate": lambda a, b, w: a * b.sigmoid(),
        "relu": lambda a, b, w: b + a.relu(),
        "zero": lambda a, b, w: a + 0 * b,
        "zero and on": lambda a, b, w: a + -((b * 0.0).reshape(6, 4).t().reshape(4, 6) @ w),
        "zeros_like": lambda a, b, w: a - b * torch.zeros_like(b),
        "where": lambda a, b, w: torch.where(a > 0, 0.0, b) + torch.where(a > 0, a, b * 0),
        "fill": lambda a, b, w: a + b.masked_fill(a > 0, 0.0),
        "cat": lambda a, b, w: torch.cat([a[:, :2] * 0, b[:, 2:4], torch.zeros(4, 2)], 1),
        "detach": lambda a, b, w: a + 0.0 * b.detach() + (b - b.detach()),
        "addmm": lambda a, b, w: torch.addmm(a * 0.0, b, w) + a,
    }

    def __init__(self, seed: int) -> None:
        super().__init__()
        pick = random.Random(seed)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(6, 6) / 2) for _ in range(3))
        self.code = [(pick.choice(list(self.OPERATIONS)), *(pick.randrange(3) for _ in range(3))) for _ in range(7)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x @ w for w in self.weights]
        for name, i, j, k in self.code:
            values.append(self.OPERATIONS[name](values[-1 - i], values[-1 - j], self.weights[k]))
        return torch.stack(values[-3:]).square()


def test_terms_of_zero_take_any_scale() -> None:
    """Random programs and random exponents: true gradients, and never a sum without parts."""
    checked = 0
    with scaled_identity():
        for seed in range(12):
            torch.manual_seed(seed)
            model, x = in_float32(lambda seed=seed: (Vanishing(seed), torch.randn(4, 6)))
            joint = joint_of(model, x)
            assert all(len(v.parts) > 1 for v in joint.scales.variables if isinstance(v, Join))
            checked += check_every_gradient(joint, model, (x,), seed)
    assert checked > 150, checked


def test_a_gradient_of_zero_neither_breaks_a_step_nor_costs_the_others_precision() -> None:
    def function(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (F.relu(x @ a) + 0.0 * (x @ b)) @ torch.cat([(a * 0)[:3], b[3:]])

    recipe = Recipe(name="narrow", hi="1-8-22", lo_forward="1-8-18", lo_backward="1-5-12")
    torch.manual_seed(0)
    weights, x = [torch.randn(6, 6, requires_grad=True) for _ in range(2)], torch.randn(4, 6)
    step = compiled(function, eager_backend(recipe, low_ratio=1.0, storage="packed"))
    wanted = torch.autograd.grad(function(*weights, x).square().sum() * 1e-9, weights)
    for _ in range(4):  # from the second on with scales
        got = torch.autograd.grad(step(*weights, x).square().sum() * 1e-9, weights)
    for a, b in zip(got, wanted, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-3


class Clipped(torch.autograd.Function):
    """A backward that is not linear in the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.1, 0.1)


def between(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Apply(function), nn.Linear(8, 4))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it
def test_an_operator_not_in_the_table_gets_unscaled_gradients_and_the_plan_says_so() -> None:
    model, x = in_float32(lambda: (between(Clipped.apply), torch.randn(5, 8)))
    with scaled_identity():
        joint = joint_of(model, x)
    assert any("clamp" in note and "unscaled" in note for note in joint.plan.notes)
    assert check_every_gradient(joint, model, (x,), seed=0) > 3


@pytest.mark.parametrize("recipe", ["bf16", IDENTITY])
def test_wide_gradients_need_no_scale(recipe) -> None:
    from unittest import mock

    from fxprec.config import Settings

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with mock.patch.object(Settings, "rounds_anything", True):
        joint = joint_of(model, torch.randn(4, 8), recipe=recipe)
    assert joint.scales is None
    assert joint.scaled.find_nodes(op="call_function", target=symbolic.RESCALE) == []


@pytest.mark.parametrize("take", [lambda x: x[:, 0], lambda x: x[:, -1:], lambda x: x.select(0, 1)])
def test_the_gradient_of_a_part_keeps_its_scale(take: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """That of a class token above all: it is written into zeros."""
    model, x = in_float32(lambda: (between(take), torch.randn(3, 5, 8)))
    with scaled_identity():
        joint = joint_of(model, x)
    assert joint.remarks == []
    assert {n.name for n in joint.scaled.nodes if "scatter" in str(n.target)} <= joint.carried.keys()
    assert check_every_gradient(joint, model, (x,), seed=0) > 6


def test_a_gradient_in_frequencies_carries_no_scale() -> None:
    """Complex numbers have none; the real gradient that comes out of them has one again."""
    model, x = in_float32(lambda: (between(lambda x: torch.fft.fft(x, norm="ortho").real), torch.randn(4, 8)))
    with scaled_identity():
        joint = joint_of(model, x)
    assert joint.remarks == []
    complex_nodes = [n for n in joint.scaled.nodes if "val" in n.meta and _is_complex(n.meta["val"])]
    assert complex_nodes
    assert not {n.name for n in complex_nodes} & joint.carried.keys()
    assert check_every_gradient(joint, model, (x,), seed=0) > 6


def _is_complex(val: object) -> bool:
    return isinstance(val, torch.Tensor) and val.dtype.is_complex
