"""The partition: the stored copy is saved, what is read from it made again, and so are the user's regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
from helpers import compiled, eager_backend, leave_out
from models import Checkpointed, Parts
from one_pass import run_pass
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from fxprec import compat
from fxprec.errors import FxprecWarning
from fxprec.ir import symbolic
from fxprec.passes.analysis import regions
from fxprec.passes.analysis.joint import is_backward, results_of
from fxprec.passes.base import Work
from fxprec.passes.partition import Partitioner

LAST = "write-plan"


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


class Cut:
    """The halves of the last partition, and how many results of forward are the model's."""

    forward: GraphModule
    backward: GraphModule
    num_results: int

    @property
    def saved(self) -> list[Node]:
        return [x for x in results_of(self.forward.graph)[self.num_results :] if isinstance(x, Node)]

    def names(self, half: GraphModule, target: object) -> set[str]:
        return {n.name for n in half.graph.find_nodes(op="call_function", target=target)}


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Cut:
    found, call = Cut(), Partitioner.__call__

    def seen(self: Partitioner, gm: GraphModule, inputs: Any, **options: Any) -> compat.Halves:
        found.forward, found.backward = call(self, gm, inputs, **options)
        found.num_results = options["num_fwd_outputs"]
        return found.forward, found.backward

    monkeypatch.setattr(Partitioner, "__call__", seen)
    return found


def test_copies_are_saved_and_decoded_again(cut: Cut) -> None:
    compiled(linears(), eager_backend(recipe="fp8", storage="packed"))(torch.randn(8, 16))
    saved = {x.name for x in cut.saved}
    assert saved & cut.names(cut.forward, symbolic.QUANTIZE)
    assert not saved & cut.names(cut.forward, symbolic.DEQUANTIZE)
    assert cut.names(cut.backward, symbolic.DEQUANTIZE)


def test_forward_stores_the_copies_that_only_backward_reads(cut: Cut) -> None:
    """torch would store them in backward, from the wide values: nothing that forward returns needs them."""
    compiled(linears(), eager_backend(recipe="fp8", storage="packed"))(torch.randn(8, 16))
    copies = cut.names(cut.forward, symbolic.QUANTIZE)
    assert copies
    assert copies <= {x.name for x in cut.saved}
    assert results_of(cut.forward.graph)[: cut.num_results][0].name not in copies
    assert not copies & cut.names(cut.backward, symbolic.QUANTIZE)


def test_effect_tokens_stay_where_they_are(cut: Cut) -> None:
    """`torch.linalg.inv` checks its result: a side effect, whose token comes out of forward before the result."""
    model = Parts(lambda m, x: x @ torch.linalg.inv(m.first(x)), first=nn.Linear(8, 8))
    compiled(model, eager_backend(recipe="fp8", storage="packed"))(torch.randn(8, 8)).sum().backward()
    assert cut.names(cut.forward, symbolic.QUANTIZE) <= {x.name for x in cut.saved}


def region() -> nn.Module:
    """Two layers, recomputed, between two that are not."""
    first, last = nn.Linear(16, 32), nn.Linear(32, 8)
    return nn.Sequential(first, Checkpointed(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), nn.Tanh(), last)


def in_region(cut: Cut, **options: Any) -> None:
    """Compile `region`."""
    torch.manual_seed(0)
    compiled(region(), eager_backend(storage="packed", **options))(torch.randn(8, 16)).sum().backward()


def test_a_copy_in_a_region_is_made_again_with_what_it_copies(cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where GEMMs multiply its codes: otherwise compute-high takes it away."""
    leave_out(monkeypatch, "compute-high", "choose-crossings")
    monkeypatch.setattr(Work, "has_crossings", True)
    in_region(cut, recipe="fp8")
    stored = {n.name: n for n in cut.forward.graph.find_nodes(op="call_function", target=symbolic.QUANTIZE)}
    inside = {name for name, n in stored.items() if regions.backward_recomputes(n)}
    assert inside
    assert not inside & {x.name for x in cut.saved}
    assert inside & cut.names(cut.backward, symbolic.QUANTIZE), "of what its backward reads"


def test_nothing_in_a_region_is_stored_but_what_it_starts_from(cut: Cut) -> None:
    in_region(cut, recipe="hfp8")
    assert not cut.names(cut.backward, symbolic.QUANTIZE) & cut.names(cut.forward, symbolic.QUANTIZE)
    ran = run_pass(LAST, region(), torch.randn(8, 16), storage="packed", recipe="hfp8")
    stored = [n for n in ran.nodes(symbolic.QUANTIZE) if not is_backward(n)]
    assert not any(regions.backward_recomputes(n) for n in stored)
    sites = [ran.work.book.sites[cast.row] for _, cast in symbolic.Quantize.among(stored)]
    hi, lo = ran.work.settings.recipe.hi.name, ran.work.settings.recipe.lo_forward.name
    assert {s.tensor: (s.format, s.reads) for s in sites} == {
        "args.0": (lo, "backward"),
        "addmm": (hi, "all"),
        "tanh": (hi, "backward"),  # its gradient is 1 - y^2
    }


def test_a_region_runs_again_from_what_it_starts_from(cut: Cut) -> None:
    in_region(cut, recipe="bf16")
    addmm = torch.ops.aten.addmm.default
    assert len(cut.names(cut.forward, addmm)) == 4
    assert len(cut.names(cut.backward, addmm)) == 1, "of the region's two, the one whose result its backward reads"
    shapes = [tuple(x.meta["val"].shape) for x in cut.saved if x.op == "call_function"]
    assert shapes.count((8, 32)) == 2, "where the region starts, and what stands behind it"


@pytest.mark.parametrize("probability", [0.0, 0.25])
def test_of_attention_that_drops_nothing_no_random_state_is_kept(cut: Cut, probability: float) -> None:
    """torch tags it as random whatever it drops, and would save the generator's state for its recomputation."""

    def attend(x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=probability)

    x = torch.randn(2, 4, 16, 16, requires_grad=True)
    with torch._inductor.config.patch(fallback_random=True):
        compiled(lambda v: checkpoint(attend, v, use_reentrant=False).sin(), eager_backend(recipe="bf16"))(x).sum()
    names = {str(node.target) for node in (*cut.forward.graph.nodes, *cut.backward.graph.nodes)}
    assert any("rng_state" in name for name in names) == (probability > 0)


def deep() -> nn.Module:
    """Layers whose activations may be computed again from their inputs, in a batch large enough for a budget."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Tanh()) for _ in range(4)))


def under_a_budget(cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile `deep` for less than all that backward reads."""
    torch.manual_seed(0)
    backend = eager_backend(recipe="bf16", peak_budget="75%")
    compiled(deep(), backend)(torch.randn(512, 64)).sum().backward()


def test_under_a_budget_torchs_min_cut_has_no_part(cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*args: object, **options: object) -> compat.Halves:
        raise AssertionError("min_cut is called")

    monkeypatch.setattr(compat, "min_cut", asked)
    under_a_budget(cut, monkeypatch)
    assert cut.saved


def test_under_a_budget_what_backward_repeats_is_in_backward_alone(cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    under_a_budget(cut, monkeypatch)
    repeated: set[str] = set()
    for target in (torch.ops.aten.tanh.default, torch.ops.aten.addmm.default):
        assert len(cut.names(cut.forward, target)) == 4, "nothing was moved to backward"
        repeated |= cut.names(cut.backward, target)
    assert repeated, "something is computed again"
    assert not repeated & {x.name for x in cut.saved}
    assert not any(is_backward(n) for n in cut.forward.graph.nodes)
    assert not any(regions.POLICY in n.meta for n in cut.backward.graph.nodes)


def test_a_partitioner_of_the_users_is_not_silently_left_out() -> None:
    class Theirs(CustomPartitionerFn):
        def __call__(self, gm: GraphModule, joint_inputs: Any, **options: Any) -> compat.Halves:
            raise AssertionError("it is called")

        def uuid(self) -> str:
            return "theirs"

    told_of: Callable[..., Any] = pytest.warns(FxprecWarning, match="custom_partitioner_fn: is not called")
    with torch._inductor.config.patch(custom_partitioner_fn=Theirs()), told_of:
        compiled(linears(), eager_backend(recipe="fp8"))(torch.randn(8, 16))


@pytest.mark.skipif(
    not hasattr(torch._functorch.config, "enable_activation_offloading"), reason="this torch has no such setting"
)
def test_torchs_offloading_is_not_silently_left_out() -> None:
    backend = eager_backend(recipe="bf16", peak_budget="100%")
    told_of = pytest.warns(FxprecWarning, match="enable_activation_offloading: moves nothing under a peak_budget")
    with torch._functorch.config.patch(enable_activation_offloading=True), told_of:
        compiled(deep(), backend)(torch.randn(512, 64)).sum().backward()
