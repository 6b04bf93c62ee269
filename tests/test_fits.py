"""``fxprec fits``: yes or no, who holds what over the step, and the largest batch, with nothing allocated."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fxprec
from fxprec import cli
from fxprec.driver.fits import TRIALS, Answer, Question, largest_batch
from fxprec.passes.notice import readable
from fxprec.plan import PeakBytes, Plan
from fxprec.plan.rows import WholeStep
from fxprec.report.plan_taker import PlanTaker
from fxprec.report.target import plan_under_fakes
from fxprec.report.whole_step import HELD, at_the_peak, picture

WIDTH, LAYERS, BATCH = 256, 4, 64
WEIGHT = WIDTH * WIDTH * 4
BUDGET = 96 * 2**20
MODEL = """import torch
from torch import nn

def make():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.empty(8, 64)

def on_many(batch=2):
    return nn.Linear(8, 8), torch.ones(batch, 8)

def images():
    return nn.Conv2d(3, 4, 3), torch.ones(2, 3, 8, 8)

def tokens():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.up, self.head = nn.Embedding(100, 64), nn.Linear(64, 256), nn.Linear(256, 100)

        def forward(self, codes, mask):
            return self.head(torch.relu(self.up(self.table(codes)))).square().mul(mask[..., None]).mean()

    with torch.device("meta"):
        return Net(), (torch.zeros(2, 128, dtype=torch.long), torch.zeros(2, 128))

def of_a_length(sequence=128, batch=2):
    net, _ = tokens()
    return net, (torch.zeros(batch, sequence, dtype=torch.long), torch.zeros(batch, sequence))

def cut():
    class Net(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            torch._dynamo.graph_break()
            return y.square().mean()

    return Net(8, 8), torch.ones(2, 8)

def wide():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)), torch.empty(2048, 256)

def frozen():
    return nn.Linear(8, 8).requires_grad_(False), torch.ones(2, 8)
"""


@pytest.fixture(autouse=True)
def _anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    (tmp_path / "t.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)


def layers(device: str) -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(LAYERS)))


def adamw(model: nn.Module) -> Any:
    return [fxprec.optim.AdamW(model.parameters(), states="auto")]


def question(factory: Callable[..., Any], budget: int = BUDGET) -> Question:
    return Question(factory, "t.py:make", budget, adamw, {"recipe": "fp8"})


def test_the_answer_is_the_plan_of_the_step_that_trains() -> None:
    found = question(lambda: (layers("meta"), torch.empty(BATCH, WIDTH, device="meta"))).answer()
    assert found.plan is not None, found.why
    torch._dynamo.reset()
    model = layers("cpu")
    options = {"recipe": "fp8", "lowering": "eager", "cpu": "avx512+bf16:1"}
    options |= {"optimizer": adamw(model), "step_budget": BUDGET - found.reserved}
    run = torch.compile(model, backend="fxprec", options=options)
    run(torch.ones(BATCH, WIDTH)).sum().backward()
    (plan,) = fxprec.backend_of(run).plans
    assert found.plan.whole_step == plan.whole_step
    assert plan.whole_step == WholeStep(
        budget=BUDGET - found.reserved, weights=LAYERS * WEIGHT, states=2 * LAYERS * WEIGHT, chosen="float32"
    )
    assert plan.peak_bytes is not None
    assert found.plan.peak_bytes is not None
    assert found.plan.peak_bytes.live == plan.peak_bytes.live
    assert found.plan.formats == plan.formats
    assert found.whole == plan.whole_step
    held = at_the_peak(found.whole, found.peak)
    assert list(held) == list(HELD)
    assert sum(held.values()) == LAYERS * WEIGHT * 3 + plan.peak_bytes.planned


def test_tied_weights_on_meta_count_once() -> None:
    def make() -> tuple[nn.Module, Tensor]:
        model = layers("meta")
        model[1][0].weight = model[0][0].weight
        return model, torch.empty(BATCH, WIDTH, device="meta")

    found = question(make).answer()
    assert found.plan is not None
    assert found.plan.whole_step is not None
    assert found.plan.whole_step.weights == (LAYERS - 1) * WEIGHT


def test_a_factory_may_convert_its_model_and_tied_weights_stay_one() -> None:
    def make() -> tuple[nn.Module, Tensor]:
        model = layers("cpu")
        model[1][0].weight = model[0][0].weight
        return model.bfloat16(), torch.ones(BATCH, WIDTH, dtype=torch.bfloat16)

    found = question(make).answer()
    assert found.plan is not None
    assert found.plan.whole_step is not None
    assert found.plan.whole_step.weights == (LAYERS - 1) * WEIGHT // 2


def test_a_batch_takes_the_place_of_the_inputs_own() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return torch.relu(super().forward(x) * scale)

    for batch, found in ((None, 8), (16, 16)):
        torch._dynamo.reset()
        answer = question(lambda: (Scaled(64, 64), (torch.ones(8, 64), torch.ones(64)))).answer(batch)
        assert answer.batch == found
        assert answer.plan is not None
        shapes = {site.shape for site in answer.plan.sites if site.kind == "output"}
        assert any(str(found) in shape for shape in shapes), shapes


@pytest.mark.parametrize("most", [0, 1, 5, 8, 40, 10**9])
@pytest.mark.parametrize("first", [1, 8, 100])
def test_the_largest_batch_is_found_in_few_plans(first: int, most: int) -> None:
    tried: list[int] = []

    def answer(batch: int) -> Answer:
        tried.append(batch)
        return Answer(batch, 1, BUDGET, 0, "cpu", Plan() if batch <= most else None)

    found = list(largest_batch(answer(first), answer))
    assert [a.batch for a in found] == tried
    assert len(set(tried)) == len(tried) <= TRIALS
    best = max((a.batch for a in found if a.fits), default=0)
    if len(tried) < TRIALS:
        assert best == most, "the search has ended by itself"
    else:
        assert best <= most


@pytest.mark.parametrize("factory", ["tokens", "of_a_length"])
def test_the_longest_sequence_of_a_batch_is_found(factory: str) -> None:
    code, said = run(f"t.py:{factory}", "--gpu", "67MiB", "--batch", "4", "--longest", "--json")
    found = json.loads(said)
    assert (code, found["fits"], found["batch"], found["sequence"]) == (0, True, 4, 128)
    best = found["longest_sequence"]
    tried = {t["sequence"]: t["fits"] for t in found["tried_sequence"]}
    assert best % 64 == 0
    assert best > 128
    assert (tried[best], tried[best + 64]) == (True, False)
    code, said = run(f"t.py:{factory}", "--gpu", "67MiB", "--batch", "4", "--sequence", str(best + 64))
    assert code == 1
    assert said.startswith(f"t.py:{factory}, batch 4, sequence {best + 64}, in 67.00 MiB")


def test_muon_steps_matrices_and_adamw_the_rest() -> None:
    _, said = run("t.py:tokens", "--gpu", "1GiB", "--optimizer", "muon", "--json")
    matrices, others = 64 * 256 + 256 * 100, 100 * 64 + 256 + 100
    assert json.loads(said)["peak"]["optimizer_states"] == 4 * (matrices + 2 * others)


def test_the_picture_stacks_who_holds_what() -> None:
    live = ((1, 1, 0, 0, 0, 0), (1, 1, 0, 1, 4, 1), (0, 0, 0, 0, 4, 0))
    peak = PeakBytes(budget=10, high=10, planned=8, live=live)
    whole = WholeStep(budget=14, weights=2, states=2)
    assert at_the_peak(whole, peak) == dict(zip(HELD, (2, 2, 4, 2, 2), strict=True))
    assert [line[11:] for line in picture(whole, peak, 14)[1:15]] == [
        "", "", " t", " t", " a", " a", " gg", " gg", "agg", "agg", "sss", "sss", "www", "www",
    ]  # fmt: skip


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["fits", *arguments])
    return result.exit_code, result.stdout


def test_the_command_says_yes_and_writes_the_plan_and_its_page(tmp_path: Path) -> None:
    code, said = run("t.py:make", "--gpu", "100MiB", "--out", "found")
    assert code == 0
    assert said.startswith("t.py:make, batch 8, in 100.00 MiB (104857600 bytes): it fits\n")
    assert re.search(r"^  optimizer states +0\.06 MiB in float32$", said, re.MULTILINE)
    assert (tmp_path / "found/report.html").is_file()
    plan = Plan.load(tmp_path / "found/plan.json")
    assert plan.whole_step is not None
    assert plan.whole_step.weights == 2 * (64 * 64 + 64) * 4


def test_gradients_that_an_exact_norm_wants_are_counted() -> None:
    found = {}
    for norm in ("exact", "last"):
        code, said = run("t.py:make", "--gpu", "100MiB", "--max-norm", "1", "--norm", norm, "--json")
        assert code == 0
        found[norm] = json.loads(said)["peak"]
    assert found["exact"]["gradients"] - found["last"]["gradients"] >= 64 * 64 * 4


def test_gradients_summed_in_bf16_are_counted_in_16_bits() -> None:
    found = {}
    for given in ((), ("--gradients", "bf16")):
        code, said = run("t.py:make", "--gpu", "100MiB", *given, "--json")
        assert code == 0
        found[given] = json.loads(said)["peak"]["gradients"]
    plain, summed = found.values()
    assert summed - plain == 2 * 2 * (64 * 64 + 64)


TRAINED = 4 * 2 * (256 * 256 + 256)
"""Bytes of the parameters of `wide`, in float32."""


@pytest.mark.parametrize(("name", "states", "momentum"), [("adamw", 2, 0.0), ("sgd", 0, 0.0), ("sgd", 1, 0.9)])
def test_a_torch_optimizer_fits_with_the_peak_budget_that_is_named(name: str, states: int, momentum: float) -> None:
    """The named bytes train in the plan that was shown; states and gradients are counted as torch holds them."""
    given = ("--optimizer", f"torch.{name}", "--momentum", str(momentum), "--gpu", "76MiB", "--json")
    code, said = run("t.py:wide", *given)
    found = json.loads(said)
    assert code == 0
    assert found["peak"]["weights"] == TRAINED
    assert found["peak"]["optimizer_states"] == states * TRAINED
    assert found["peak_budget"] == found["budget"] - found["reserved"] - (1 + states) * TRAINED
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    options = {"recipe": "fp8", "lowering": "eager", "cpu": "avx512+bf16:1", "peak_budget": found["peak_budget"]}
    run_ = torch.compile(model, backend="fxprec", options=options)
    run_(torch.ones(2048, 256)).sum().backward()
    (plan,) = fxprec.backend_of(run_).plans
    assert plan.peak_bytes is not None
    assert plan.peak_bytes.planned == sum(found["peak"].values()) - (1 + states) * TRAINED
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum)
    if name == "adamw":
        optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    kept = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor) and x.dim()]
    assert sum(x.nbytes for x in kept) == states * TRAINED


def test_a_given_peak_budget_is_planned_for_and_compared_with_the_memory() -> None:
    code, said = run("t.py:wide", "--optimizer", "torch.adamw", "--peak-budget", "80%", "--gpu", "1GiB", "--json")
    found = json.loads(said)
    assert (code, found["peak_budget"]) == (0, None)
    held = sum(found["peak"].values())
    for budget, fits in ((held + found["reserved"], 1), (held - 1, 0)):
        memory = int((budget + 2**26) / 0.97) if fits else budget
        code, said = run(
            "t.py:wide", "--optimizer", "torch.adamw", "--peak-budget", "80%", "--gpu", str(memory), "--json"
        )
        assert code == 1 - fits
    assert f"with peak_budget=80% the step holds {readable(held - 3 * TRAINED)} more" in json.loads(said)["why"]
    code, _ = run(
        "t.py:wide", "--optimizer", "torch.adamw", "--peak-budget", "80%", "--gpu", str(json.loads(said)["enough"])
    )
    assert code == 0
    code, said = run("t.py:wide", "--peak-budget", "80%", "--gpu", "1GiB", "--json")
    ours = json.loads(said)["peak"]
    assert (code, ours["optimizer_states"]) == (0, 2 * TRAINED)
    assert ours["gradients"] < found["peak"]["gradients"] + TRAINED


def test_a_step_of_torch_that_needs_more_than_the_memory_is_said() -> None:
    """AdamW of torch.optim, by default on a GPU, makes the square roots of all averages at once."""
    _, said = run("t.py:wide", "--optimizer", "torch.adamw", "--gpu", "67.5MiB", "--json")
    (told,) = json.loads(said)["not_done"]
    assert f"holds {readable(5 * TRAINED)} in all; give it fused=True" in told


def test_what_the_plan_does_not_fulfil_is_said() -> None:
    code, said = run("t.py:make", "--gpu", "100MiB", "--keep-high", "heads", "--json")
    assert code == 0
    assert any("keep_high pattern 'heads' matches no module" in line for line in json.loads(said)["not_done"])


def test_the_command_says_no_and_why_as_json() -> None:
    code, said = run("t.py:on_many", "--gpu", "1KiB", "--batch", "5", "--json")
    found = json.loads(said)
    assert code == 1
    assert (found["fits"], found["batch"], found["peak"]) == (False, 5, None)
    assert "in addition to these the lowest peak found is" in found["why"]
    assert found["why"].startswith("64.00 MiB (67108884 bytes) stay free for libraries; in the rest: step_"), found[
        "why"
    ]
    code, _ = run("t.py:on_many", "--gpu", str(found["enough"]), "--batch", "5")
    assert code == 0
    code, _ = run("t.py:on_many", "--gpu", str(int(0.97 * found["enough"])), "--batch", "5")
    assert code == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("t.py:make --gpu much", "--gpu is 'much', which is not a size"),
        ("t.py:make --gpu 24", "--gpu 24 is a number of bytes, and no step is as small; give it a unit, as in 24GiB"),
        ("t.py:make --gpu 1GiB --batch 0", "--batch is 0; give it 1 or more"),
        ("t.py:make --gpu 1GiB --sequence 0", "--sequence is 0; give it 1 or more"),
        (
            "t.py:images --gpu 1GiB --sequence 9",
            "its first input has 4 dimensions, so the second is not a sequence length",
        ),
        (
            "t.py:make --gpu 1GiB --optimizer moon",
            "--optimizer moon is unknown; give adamw, lion, muon, sgd, torch.adamw or torch.sgd",
        ),
        ("t.py:make --gpu 1GiB --momentum 0.9", "--momentum is of sgd, and --optimizer is adamw; leave --momentum out"),
        ("t.py:make --gpu 1GiB --states int4", "unknown states of group 0 'int4'"),
        ("t.py:make --gpu 1GiB --max-norm 0", "max_norm of group 0 is 0.0, out of range; give it a number above 0"),
        ("t.py:make --gpu 1GiB --norm last", "--norm last says which norm clips, and --max-norm is not given; give"),
        (
            "t.py:make --gpu 1GiB --optimizer torch.adamw --states 8bit",
            "--states is of fxprec.optim, and --optimizer is torch",
        ),
        (
            "t.py:make --gpu 1GiB --optimizer torch.sgd --max-norm 1",
            "--max-norm is of fxprec.optim, and --optimizer is",
        ),
        ("t.py:make --gpu 1GiB --peak-budget much", "peak_budget is 'much', which is not a size"),
        ("t.py:frozen --gpu 1GiB", "no parameter requires a gradient"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["fits", *arguments.split()])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("given", [(), ("--optimizer", "torch.adamw"), ("--peak-budget", "80%")])
def test_a_graph_break_is_no_answer(given: tuple[str, ...]) -> None:
    code, said = run("t.py:cut", "--gpu", "1GiB", *given)
    assert code == 1
    assert "a graph break splits the step" in said


def test_a_plan_alone_is_taken_while_torch_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under TORCH_TRACE the texts of passes were written to a folder that nobody had made."""
    monkeypatch.setattr("fxprec.compat.traces_artifacts", lambda: True)
    taker, config = PlanTaker(), fxprec.Config(recipe="fp8", lowering="eager")
    backend = fxprec.Backend(config, dump=taker)
    plan_under_fakes(lambda: (nn.Linear(8, 8), torch.ones(2, 8)), backend, "model.py:make", taker)
    assert (len(taker.plans), [path.name for path in tmp_path.iterdir()]) == (1, ["t.py"])
