"""Real storage: forward computes with values, backward with the one copy that crosses to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from helpers import assert_bits_equal, compiled, eager_backend, gradients, recorded_works
from one_pass import Ran, run_pass
from processors import plan_on
from test_casts_simulated import CNN, Program, Transformer

from benchmarks.planned import casts_of, misfits
from fxprec.driver import joint_compilation
from fxprec.ir import symbolic
from fxprec.numerics.codec import decode_bits, encode_bits
from fxprec.numerics.formats import parse
from fxprec.passes.analysis.joint import is_backward, is_view
from fxprec.passes.analysis.saved_bytes import _saved_storages, _storage
from fxprec.passes.compute_high import GRADIENT

LOW = {"recipe": "hfp8", "storage": "packed", "promote_above": None}


class Parts(nn.Module):
    """One GEMM's result in three pieces, read through views of views by forward and by backward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(8, dim=-1)
        gate = (q.view(2, 4, 8).transpose(1, 2) * k.view(2, 4, 8).transpose(1, 2)).relu()
        return self.out(gate.transpose(1, 2).reshape(8, 8) * v.sin())


class Shared(nn.Module):
    """A ReLU's result that a GEMM and a product read, each in both halves, and that leaves the graph too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x).relu()
        return h * self.second(h), h


def models() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    labels = torch.randint(5, (4,))
    words = torch.randint(11, (3, 6))
    programs = {f"program {seed}": (Program(seed), (torch.randn(4, 6),)) for seed in range(12)}
    return {
        "parts": (Parts(), (torch.randn(8, 8),)),
        "shared": (Shared(), (torch.randn(8, 8),)),
        "normed": (nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 8)), (torch.randn(8, 8),)),
        "cnn": (CNN(), (torch.randn(4, 3, 8, 8), labels)),
        "transformer": (Transformer(explicit=False), (words, words.flip(0))),
        "explicit attention": (Transformer(explicit=True), (words, words.flip(0))),
        **programs,
    }


GATE = ("parts", "shared", "normed", "transformer", "program 3", "program 7")
NAMES = [pytest.param(name, marks=() if name in GATE else pytest.mark.full) for name in models()]


def readers(node: Node) -> Iterator[Node]:
    """What reads a value, through views."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        elif user.op != "output":
            yield user


def read_back(q: Node) -> Node:
    (decoded,) = (user for user in q.users if user.target is symbolic.DEQUANTIZE)
    return decoded


@pytest.mark.parametrize("name", NAMES)
def test_each_half_reads_its_own_and_nothing_else_is_stored(name: str) -> None:
    """Before operators are narrowed: forward reads values, backward the copy of what is copied."""
    model, args = models()[name]
    ran = run_pass("compute-high", model, *args, **LOW)
    sites = ran.work.book.sites
    for q, cast in symbolic.Quantize.among(ran.nodes(symbolic.QUANTIZE)):
        assert sites[cast.row].reads == "backward"
        assert sites[cast.row].kind == "output", "parameters and gradients stay as they are"
        assert all(map(is_backward, readers(read_back(q)))), f"forward reads the copy of {cast.x}"
        assert list(readers(read_back(q))), f"nobody reads the copy of {cast.x}"
        assert not [r for r in readers(cast.x) if r is not q and is_backward(r)], (
            f"backward reads {cast.x} and its copy"
        )
    copied = {cast.row for _, cast in symbolic.Quantize.among(ran.nodes(symbolic.QUANTIZE))}
    rest = [s for s in sites if s.id not in copied]
    hi = ran.work.settings.recipe.hi.name
    assert all(s.reads == "all" and s.format in (hi, "fp32") for s in rest)


@pytest.mark.parametrize("name", NAMES)
def test_forward_never_waits_for_backward(name: str) -> None:
    """In bf16 forward's GEMMs share the copy of backward, unless backward makes the value again."""
    model, args = models()[name]
    ran = run_pass("write-plan", model, *args, recipe="bf16", low_ratio=None)
    for node in filter(is_backward, ran.graph.nodes):
        assert all(map(is_backward, readers(node))), node.format_node()


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Graph, int]]:
    """The forward halves as AOTAutograd cut them, and how many of their results are the model's."""
    found: list[tuple[Graph, int]] = []
    complete = joint_compilation.JointCompilation._complete_plan

    def keep(self: Any, forward: Any) -> None:
        found.append((forward.graph, self.compiled.num_results))
        complete(self, forward)

    monkeypatch.setattr(joint_compilation.JointCompilation, "_complete_plan", keep)
    return found


def source(node: Node) -> Node:
    """What a saved tensor is a copy of, however often it was cast."""
    casts = (symbolic.QUANTIZE, symbolic.DEQUANTIZE, torch.ops.prims.convert_element_type.default)
    while node.target in casts:
        node = _storage(node.all_input_nodes[0])
    return node


@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_crosses_to_backward_in_two_formats(forwards: Any, name: str) -> None:
    model, args = models()[name]
    step = compiled(model, eager_backend("fp8", low_ratio=0.6))
    out = step(*args)
    sum(o.sum() for o in (out if isinstance(out, tuple) else (out,))).backward()
    ((graph, results),) = forwards
    saved = [source(node) for node in _saved_storages(graph, results)]
    assert len(saved) == len(set(saved)), sorted(n.name for n in saved if saved.count(n) > 1)


def outputs(model: nn.Module, args: tuple[Tensor, ...], training: bool = True, **options: Any) -> list[Tensor]:
    with torch.set_grad_enabled(training):
        found = compiled(model, eager_backend(**{**options, "promote_above": None}))(*args)
    return [o.detach() for o in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.parametrize(
    ("name", "recipe", "storage"),
    [
        ("parts", "hfp8", "packed"),
        ("shared", "fp8", "native"),
        ("normed", "hfp8", "packed"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("parts", "fp8", "native"),
                ("shared", "hfp8", "packed"),
                ("normed", "fp8", "native"),
                ("transformer", "hfp8", "packed"),
                ("transformer", "fp8", "native"),
            )
        ),
    ],
)
def test_outputs_are_those_of_the_high_format_whatever_is_low(
    monkeypatch: pytest.MonkeyPatch, name: str, recipe: str, storage: str
) -> None:
    """Bit for bit; of evaluation too. A model's output is among what forward reads."""
    plan_on(monkeypatch, "avx512+bf16+fp16")
    model, args = models()[name]
    wanted = outputs(model, args, recipe=recipe, storage=storage, low_ratio=0.0)
    for ratio, training in ((1.0, True), (1.0, False)):
        found = outputs(model, args, training, recipe=recipe, storage=storage, low_ratio=ratio)
        for a, b in zip(found, wanted, strict=True):
            assert_bits_equal(a, b, f"{name}, low_ratio {ratio}, {training=}")
    rounded_for_all = outputs(model, args, recipe=recipe, storage="simulate", low_ratio=1.0)
    assert not all(torch.equal(a, b) for a, b in zip(rounded_for_all, wanted, strict=True)), (
        "which 8 bits would show in"
    )


def test_an_evaluation_graph_stores_nothing() -> None:
    with torch.no_grad():
        ran = run_pass("write-plan", Parts(), torch.randn(8, 8), **LOW)
    assert not [n for n in ran.graph.nodes if n.target in (symbolic.QUANTIZE, symbolic.DEQUANTIZE)]
    assert {s.reads for s in ran.work.book.sites} == {"all"}


def rounded(fmt: str) -> Callable[[Tensor], Tensor]:
    return lambda x: decode_bits(encode_bits(x, parse(fmt)), parse(fmt))


def test_gradients_are_those_of_what_is_saved_rounded_and_nothing_else() -> None:
    """Linear, ReLU, linear, by hand: the operands that the weights' gradients multiply, and ReLU's result."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(32, 8)
    backend = eager_backend("hfp8", storage="packed", low_ratio=1.0, promote_above=None)
    out = compiled(model, backend)(x)
    dy = torch.randn(out.shape)
    out.backward(dy)
    found = gradients(model)

    low = rounded(backend.plans[0].recipe.lo_forward.name)
    h = F.relu(F.linear(x, model[0].weight, model[0].bias)).detach()
    dz = dy @ model[2].weight.detach() * (low(h) > 0)
    wanted = {
        "0.weight": dz.T @ low(x),
        "0.bias": dz.sum(0),
        "2.weight": dy.T @ low(h),
        "2.bias": dy.sum(0),
    }
    for name, gradient in wanted.items():
        assert_bits_equal(found[name], gradient, name)
    assert not torch.equal(low(h), h)
    assert_bits_equal(out.detach(), F.linear(h, model[2].weight, model[2].bias).detach())


def test_a_piece_read_through_views_is_decoded_in_backward_alone() -> None:
    ran: Ran = run_pass("compute-high", Parts(), torch.randn(8, 8), **LOW)
    copied = {cast.x.name for _, cast in symbolic.Quantize.among(ran.nodes(symbolic.QUANTIZE))}
    assert "addmm" in copied, "once, and whole: not its three pieces"
    assert not [name for name in copied if name.startswith(("getitem", "split", "view"))]
    pieces = [n for n in ran.graph.nodes if n.target is torch.ops.aten.split.Tensor]
    assert [is_backward(n) or n.args[0].target is symbolic.DEQUANTIZE for n in pieces].count(False) == 1


class Dropped(nn.Linear):
    """Attention with dropout: on a CPU torch decomposes it, and under autocast each product converts its operands."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in super().forward(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("mixed", [False, True])
def test_no_gradient_of_attention_with_dropout_is_narrowed_where_no_codes_are_multiplied(mixed: bool) -> None:
    """Under autocast a gradient has two conversions, and backward converts forward's operands: all were in e5m2."""
    with recorded_works() as works, torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        result = compiled(nn.Sequential(nn.Linear(32, 32), Dropped(32, 96)), eager_backend("fp8"))(
            torch.randn(2, 8, 32)
        )
    result.float().square().sum().backward()
    (work,) = works
    assert misfits(work) == []
    assert {site.direction for _, _, site in casts_of(work)} == {"forward"}
    assert {site.why for site in work.plan.sites if site.direction == "backward"} == {GRADIENT}


def test_a_copy_that_others_are_computed_again_from_is_in_the_plan() -> None:
    """Attention's output was stored in e4m3fn for its own transpose, and the plan said bf16, which nobody would read."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True)
    with recorded_works() as works, torch.autocast("cpu", torch.bfloat16):
        result = compiled(layer, eager_backend("fp8"))(torch.randn(2, 8, 32))
    result.float().square().sum().backward()
    (work,) = works
    assert misfits(work) == []
    assert {site.reads for _, _, site in casts_of(work)} == {"backward"}


@pytest.mark.parametrize("options", [{}, {"peak_budget": "100%"}], ids=["no budget", "budget"])
def test_under_autocast_a_gradient_through_a_weight_reads_no_narrow_copy_of_it(options: dict[str, Any]) -> None:
    """Backward converts the weight again. It rounded the conversion to e4m3fn once more: gradients were 3 % off."""

    def of_input(recipe: str, **others: Any) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(16, 32, requires_grad=True)
        step = compiled(
            nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 16)), eager_backend(recipe, **others)
        )
        with torch.autocast("cpu", torch.bfloat16):
            result = step(x)
        result.float().square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(of_input("fp8", **options), of_input("bf16"))
