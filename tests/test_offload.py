"""The way ``offload``: what waits in host memory comes back the same. On a CPU, where the copies are copies alike.

What Inductor makes of it for a GPU is in tests/generated/test_gpu_offload.py; no test here or there runs on one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend_helpers import eager_backend
from command_line import exit_code
from models import Parts
from test_peak_budget import TOKENS, Convolutions, trained, transformer
from torch import Tensor, nn
from torch.fx import Graph

import fxprec
import fxprec.driver.graph
import fxprec.driver.joint_compilation
from fxprec import FxprecWarning, Plan
from fxprec.kernels.host import WaitOffload
from fxprec.passes import choose_crossings
from fxprec.passes.analysis.joint import results_of
from fxprec.passes.analysis.replay.loops import Loops
from fxprec.passes.analysis.replay.replay import Replay
from fxprec.plan.explain import peak_lines
from fxprec.report.compare import differences

ways = pytest.mark.parametrize("ways", [("offload",), ("narrow", "offload")], ids=lambda ways: "+".join(ways))


@pytest.fixture(autouse=True)
def a_cpu_will_do(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "refused" in request.node.name:
        return
    monkeypatch.setattr(fxprec.driver.graph, "refuse_offload", lambda device, settings, given: None)


class Shared(nn.Module):
    """Backward reads one base and two views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        base = torch.tanh(self.a(x))
        rows, heads = base.view(8, -1), base.view(16, -1, 8)
        mixed = (heads @ heads.mT).sigmoid().sum() * rows.square()
        return self.c(F.gelu(self.b(mixed.view_as(base) + base)))


def shared() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Shared() for _ in range(3))), torch.randn(64, 32)


def convolutions() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Convolutions().to(memory_format=torch.channels_last)
    return model, torch.randn(8, 3, 16, 16).to(memory_format=torch.channels_last)


def in_16_bits() -> tuple[nn.Module, Tensor]:
    """Backward reads values themselves, and no copies."""
    model, x = shared()
    return model.to(torch.bfloat16), x.to(torch.bfloat16)


NETWORKS: dict[str, Any] = {
    "16 bits": in_16_bits,
    "transformer": lambda: (transformer(), TOKENS),
    "views": shared,
    "channels last": convolutions,
}


def moved(plan: Plan) -> list[str]:
    assert plan.peak_bytes is not None
    return [site.tensor for site in plan.sites if site.way == "offload"] + [*plan.peak_bytes.offloaded]


def staying(plan: Plan) -> Plan:
    """Return a plan with everything in host memory kept on the device instead, in the same format."""
    assert plan.peak_bytes is not None
    low = plan.recipe.lo_forward.name
    sites = [replace(s, way="narrow" if s.format == low else "keep") if s.way == "offload" else s for s in plan.sites]
    peak = replace(plan.peak_bytes, kept=plan.peak_bytes.kept + plan.peak_bytes.offloaded, offloaded=())
    return replace(plan, sites=tuple(sites), peak_bytes=peak)


def watched(patch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of each tensor that the partitioned forward half hands to backward in host memory."""
    found: list[int] = []
    of = fxprec.driver.joint_compilation.as_partitioned

    def watch(plan: Plan, forward: Graph, num_outputs: int, inputs: Any) -> Plan:
        found[:] = [
            n.meta["val"].nbytes
            for n in results_of(forward)[num_outputs:]
            if getattr(n, "target", 0) is WaitOffload.target
        ]
        return of(plan, forward, num_outputs, inputs)

    patch.setattr(fxprec.driver.joint_compilation, "as_partitioned", watch)
    return found


@ways
@pytest.mark.parametrize(
    ("network", "share"), [("transformer", "65%"), ("views", "75%"), ("channels last", "85%"), ("16 bits", "75%")]
)
def test_gradients_are_those_of_the_same_plan_on_the_device_bit_for_bit(
    network: str, share: str, ways: tuple[str, ...], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = NETWORKS[network]()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with monkeypatch.context() as patch:
        sizes = watched(patch)
        recipe = "bf16" if network == "16 bits" else "fp8"
        plan, found = trained(model, x, recipe=recipe, peak_budget=share, ways=ways)
    assert len(sizes) == len(moved(plan)) > 0
    staying(plan).save(tmp_path / "plan.json")
    model.load_state_dict(state)
    other, wanted = trained(model, x, recipe=recipe, plan=tmp_path / "plan.json")
    assert not moved(other)
    assert torch.equal(found, wanted)
    assert plan.peak_bytes.planned < other.peak_bytes.planned  # type: ignore[union-attr]
    assert other.saved_bytes.planned - plan.saved_bytes.planned == sum(sizes), "nothing is saved twice"  # type: ignore[union-attr]


def test_a_budget_is_met_that_nothing_else_meets() -> None:
    model = transformer()
    least = 0.62
    with pytest.raises(fxprec.BudgetError, match="lowest peak found"):
        trained(model, TOKENS, peak_budget=f"{least:.0%}", ways=("narrow",))
    plan, _ = trained(model, TOKENS, peak_budget=f"{least:.0%}", ways=("narrow", "offload"))
    assert plan.peak_bytes is not None
    assert plan.peak_bytes.planned <= plan.peak_bytes.budget
    assert moved(plan)


def test_what_waits_in_host_memory_is_there_for_a_second_backward() -> None:
    model = transformer()
    backend = eager_backend("native", recipe="fp8", low_ratio=None, peak_budget="80%", ways=("offload",))
    with torch._functorch.config.patch(donated_buffer=False):
        loss = torch.compile(model, backend=backend)(TOKENS).square().mean()
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        loss.backward()
    assert moved(backend.plans[0])
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("offload", "outputs, values of dynamic size and values with gaps in memory stay on the device"),
        ("int4", "for the first value, its shape .* is dynamic, and blocks are counted when the graph is compiled"),
    ],
)
def test_a_way_that_no_value_can_have_is_a_warning(way: str, why: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    backend = eager_backend("native", recipe="fp8", low_ratio=None, peak_budget="100%", ways=("narrow", way))
    with pytest.warns(FxprecWarning, match=f"ways '{way}': no value of this graph can be kept so: {why}"):
        torch.compile(model, backend=backend, dynamic=True)(torch.randn(64, 32)).square().mean().backward()


def replayed(**options: Any) -> Replay:
    found: list[Replay] = []
    solved = choose_crossings.within_budget

    def watch(work: Any, needs: Any, *rest: Any) -> Any:
        fit, peak = solved(work, needs, *rest)
        found.append(fit.replay)
        return fit, peak

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_crossings, "within_budget", watch)
        trained(transformer(), TOKENS, **options)
    return found[0]


def test_between_its_last_use_and_its_first_in_backward_it_holds_nothing() -> None:
    replay = replayed(peak_budget="70%", ways=("offload",))
    assert replay.offloads
    for value in replay.offloads:
        line = replay.timeline
        there = [replay.lives(value, time, recomputed=False) for time in range(len(line.order))]
        leaves, read = line.order.index(replay.offloads[value]), line.order.index(replay.reloads[value])
        assert there[leaves], "it counts while it is copied"
        assert there[read]
        copy = replay.copies.get(value, replay.at[value])
        last = max([leaves, *(line.order.index(i) for i in _readers(replay, copy) if i < replay.border)])
        sent, comes = line.dies[copy], line.born[replay.reloads[value]]
        assert sent >= last
        assert comes <= read
        assert replay.sent[value] is replay.anchors[line.order[sent]]
        assert replay.fetched[value] is replay.anchors[line.order[comes]]
        assert not any(there[sent + 1 : comes]), value
        assert comes >= line.split > sent
    assert any(line.born[i] < line.order.index(i) for i in replay.reloads.values()), (
        "some come back before they are read"
    )


def _readers(replay: Replay, item: int) -> list[int]:
    """Return the kernels that read an item's memory."""
    reads = Loops(replay.items).reads
    return [i for i in replay.timeline.order if item in reads[i]]


def test_a_plan_is_the_same_every_time() -> None:
    plans = [trained(transformer(), TOKENS, peak_budget="70%", ways=("narrow", "offload"))[0] for _ in range(2)]
    assert plans[0].to_dict() == plans[1].to_dict()


def test_a_plan_file_says_what_waits_in_host_memory_and_can_be_edited(tmp_path: Any) -> None:
    model = transformer()
    plan, found = trained(model, TOKENS, peak_budget="70%", ways=("narrow", "offload"))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    again, same = trained(model, TOKENS, plan=tmp_path / "plan.json")
    assert moved(again) == moved(plan)
    assert torch.equal(found, same)
    edited = next(s for s in plan.sites if s.way in ("keep", "narrow") and s.kind == "output")
    sites = tuple(replace(s, way="offload") if s is edited else s for s in plan.sites)
    replace(plan, sites=sites).save(tmp_path / "edited.json")
    more, bits = trained(model, TOKENS, plan=tmp_path / "edited.json")
    assert set(moved(more)) == {*moved(plan), edited.tensor}
    assert torch.equal(found, bits)
    narrow, _ = trained(model, TOKENS, peak_budget="75%", ways=("narrow",))
    copied = next(s for s in narrow.sites if s.way == "narrow" and s.kind == "output")
    sites = tuple(replace(s, way="offload", format="e4m3fn") if s.id == copied.id else s for s in more.sites)
    replace(more, sites=sites).save(tmp_path / "low.json")
    more, _ = trained(model, TOKENS, plan=tmp_path / "low.json")
    assert [(s.way, s.format) for s in more.sites if s.id == copied.id] == [("offload", "e4m3fn")]
    low = next(s for s in more.sites if s.way == "offload" and s.format == "e4m3fn")
    promoted = tuple(replace(s, format="bf16", promoted_at=7) if s is low else s for s in more.sites)
    replace(more, sites=promoted).save(tmp_path / "promoted.json")
    higher, _ = trained(model, TOKENS, plan=tmp_path / "promoted.json")
    assert [(s.way, s.format) for s in higher.sites if s.id == low.id] == [("offload", "bf16")]
    assert any("offload" in line and edited.tensor in line for line in differences(plan, more))
    assert plan.peak_bytes is not None
    assert "in host memory" in " ".join(peak_lines(plan, plan.peak_bytes))
    assert any("in host memory" in note for note in plan.notes)


def test_blocks_do_not_leave_the_device(tmp_path: Any) -> None:
    plan, _ = trained(transformer(), TOKENS, peak_budget="80%", ways=("int4",))
    few = next(s for s in plan.sites if s.saved_as)
    replace(plan, sites=tuple(replace(s, way="offload") if s is few else s for s in plan.sites)).save(tmp_path / "p")
    with pytest.raises(fxprec.PlanError, match=r"is 'offload', and in int4 it stays on the device; give it the way"):
        trained(transformer(), TOKENS, plan=tmp_path / "p")


def test_outputs_stay(tmp_path: Any) -> None:
    both = Parts(lambda m, wide: (m.down(wide), wide), down=nn.Linear(64, 16))
    model, backend = (
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), both),
        eager_backend("native", recipe="bf16", low_ratio=None, peak_budget="100%"),
    )
    sum(y.sum() for y in torch.compile(model, backend=backend)(torch.randn(128, 16))).backward()  # type: ignore[arg-type]
    plan = backend.plans[0]
    site = next(s for s in plan.sites if s.tensor == "tanh")
    replace(plan, sites=tuple(replace(s, way="offload") if s is site else s for s in plan.sites)).save(tmp_path / "p")
    torch._dynamo.reset()
    again = eager_backend("native", recipe="bf16", low_ratio=None, plan=tmp_path / "p")
    with pytest.raises(fxprec.PlanError, match=r"\(tanh\) of the given plan is 'offload', and outputs, values"):
        torch.compile(model, backend=again)(torch.randn(128, 16))


def test_a_model_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    words = "ways has 'offload', which moves saved tensors to host memory, and a model on a CPU has them there; leave"
    with pytest.raises(fxprec.ConfigError, match=words):
        trained(transformer(), TOKENS, peak_budget="80%", ways=("offload",))
    with monkeypatch.context() as patch:
        patch.setattr(fxprec.driver.graph, "refuse_offload", lambda device, settings, given: None)
        plan, _ = trained(transformer(), TOKENS, peak_budget="75%", ways=("narrow", "offload"))
    plan.save(tmp_path / "plan.json")
    with pytest.raises(
        fxprec.PlanError, match=r"of the given plan says 'offload', to host memory, and a model on a CPU"
    ):
        trained(transformer(), TOKENS, plan=tmp_path / "plan.json")


FACTORY = """
import torch
from torch import nn
def make():
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(*blocks), (torch.randn(512, 64),)
"""


def test_a_dump_plans_what_a_run_on_a_cpu_is_refused(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(FACTORY)
    asked = f"dump {tmp_path / 'model.py'}:make --out {tmp_path / 'out'} --peak-budget 55% --ways narrow,offload"
    assert exit_code(*asked.split()) == 0
    plan = Plan.load(tmp_path / "out" / "graph-0" / "plan.json")
    assert moved(plan)
    assert "at its peak, within" in capsys.readouterr().out
