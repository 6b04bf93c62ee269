"""benchmarks/papers: the frame's verdicts, what it keeps, and the tables that are exact enough for every commit."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from bit_patterns import bit_patterns
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.papers import catalog, page, store
from benchmarks.papers.__main__ import main, number_of_seeds, selected
from benchmarks.papers.claims import Claim, Predicate, exactly, higher, lower, most, no_worse, none_worse, together
from benchmarks.papers.eight_bit import TYPES
from benchmarks.papers.found import Found, Row, spread
from benchmarks.papers.sixteen_bit import WIDE, Training, rounded
from benchmarks.papers.sweep import Network, demoted, exact
from benchmarks.papers.workloads import workload
from fxprec import quantize
from fxprec.errors import FxprecWarning
from fxprec.numerics.formats import BF16, parse

INF, NAN = float("inf"), float("nan")


def of(**rows: list[float]) -> Found:
    """One column, a value a seed."""
    count = len(next(iter(rows.values())))
    return Found({seed: {name: {"loss": values[seed]} for name, values in rows.items()} for seed in range(count)})


@pytest.mark.parametrize(
    ("judge", "a", "b", "state"),
    [
        (lower("a", "b", "loss"), [1.0, 2.0, 3.0], [1.5, 2.5, 3.6], "holds"),  # the pairs differ, the means hardly
        (lower("a", "b", "loss"), [1.0, 2.0, 3.0], [1.1, 1.9, 3.2], "not shown"),
        (lower("a", "b", "loss"), [1.5, 2.5, 3.6], [1.0, 2.0, 3.0], "fails"),
        (higher("a", "b", "loss"), [1.5, 2.5, 3.6], [1.0, 2.0, 3.0], "holds"),
        (lower("a", "b", "loss"), [2.0], [1.0], "fails"),
        (lower("a", "b", "loss"), [1.0], [1.0], "not shown"),
        (lower("a", "b", "loss"), [9.0, 9.0], [1.0, NAN], "holds"),
        (lower("a", "b", "loss"), [INF, 1.0], [1.0, 2.0], "fails"),
        (lower("a", "b", "loss"), [INF, NAN], [NAN, NAN], "not shown"),
        (no_worse("a", "b", "loss", 0.1, is_loss=True), [1.05, 2.05], [1.0, 2.0], "holds"),
        (no_worse("a", "b", "loss", 0.1, is_loss=True), [1.3, 2.3], [1.0, 2.0], "fails"),
        (no_worse("a", "b", "loss", 0.1, is_loss=True), [1.3, 1.8], [1.0, 2.0], "not shown"),
        (no_worse("a", "b", "loss", 0.1, is_loss=False), [1.3, 2.3], [1.0, 2.0], "holds"),
        (no_worse("a", "b", "loss", 0.1, is_loss=False), [0.7, 1.7], [1.0, 2.0], "fails"),
    ],
)
def test_a_difference_is_shown_beyond_twice_its_standard_error(
    judge: Predicate, a: list[float], b: list[float], state: str
) -> None:
    assert judge(of(a=a, b=b)).state == state


def test_the_worst_of_several_verdicts_counts() -> None:
    holds, fails = exactly(True, "one"), exactly(False, "two")
    assert together(holds, fails) == type(holds)("fails", "one; two")
    assert together(holds, holds).state == "holds"
    assert most({"a": holds, "b": fails}, 1) == type(holds)("holds", "1 of 2; b fails: two")
    assert [
        most({"a": holds, "b": fails}, 2).state,
        most({"a": holds, "b": lower("x", "y", "loss")(of(x=[1.0], y=[1.0]))}, 2).state,
    ] == ["fails", "not shown"]


def test_figures_are_shown_to_the_digits_that_their_spread_leaves() -> None:
    assert spread([99.351, 99.543]) == "99.45 ± 0.14"
    assert spread([33.3333333]) == "33.33"
    assert of(a=[1.0, INF, 2.0]).text("a", "loss") == "1.50 ± 0.71 (1 of 3 diverged)"
    assert of(a=[NAN]).text("a", "loss") == "(1 of 1 diverged)"


def table_of(run: Callable[[int, bool], list[Row]], is_true: bool) -> ModuleType:
    claim = Claim("it is so", lambda found: exactly(is_true), "because")
    return SimpleNamespace(  # type: ignore[return-value]
        TITLE="a title", SOURCE="Table 0", PUBLISHED={"fp32": {"loss": 0.25}}, SMALLER="all", DEVIATES="", SEEDS=3,
        run=run, CLAIMS=[claim],
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results and pages of its own, and one table that a test gives."""
    monkeypatch.setattr(store, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(page, "DOCS", tmp_path)
    monkeypatch.setattr(page.write, "__defaults__", (tmp_path,))
    monkeypatch.setattr(catalog, "is_built", lambda name: name == "bf16.memory")
    return tmp_path


def test_a_run_that_was_cut_off_goes_on_where_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def run(seed: int, full: bool) -> list[Row]:
        asked.append(seed)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return [("fp32", {"loss": 0.5 + seed})]

    monkeypatch.setattr(catalog, "load", lambda name: table_of(run, True))
    with pytest.raises(KeyboardInterrupt):
        main(["bf16.memory"])
    assert main(["bf16.memory"]) == 0
    assert asked == [0, 1, 1, 2]
    kept = json.loads((folder / "results/bf16.memory.json").read_text(encoding="utf-8"))
    assert [rows["fp32"]["loss"] for rows in kept["seeds"].values()] == [0.5, 1.5, 2.5]
    text = (folder / "papers.md").read_text(encoding="utf-8")
    assert "| fp32 | 0.25 | 1.5 ± 1.0 |" in text
    assert "- **holds**: It is so" in text
    assert ">bf16.memory<" in (folder / "papers/overview.svg").read_text(encoding="utf-8")
    assert main(["bf16.memory", "--again", "--seeds", "1"]) == 0
    assert asked[4:] == [0]
    assert "- **not shown**: It is so. *Why*: because *Measured*: one seed." in (folder / "papers.md").read_text(
        encoding="utf-8"
    )


def test_a_table_in_parts_goes_on_at_the_part_where_it_was_cut_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, str]] = []

    def run(seed: int, full: bool, part: str) -> list[Row]:
        asked.append((seed, part))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return [(f"{part}, one side", {"loss": 0.5 + seed})]

    table = table_of(run, True)  # type: ignore[arg-type]
    table.parts = lambda full: ("a", "ab")
    monkeypatch.setattr(catalog, "load", lambda name: table)
    with pytest.raises(KeyboardInterrupt):
        main(["bf16.memory"])
    assert main(["bf16.memory", "--seeds", "2"]) == 0
    assert asked == [(0, "a"), (0, "ab"), (0, "ab"), (1, "a"), (1, "ab")]
    kept = json.loads((folder / "results/bf16.memory.json").read_text(encoding="utf-8"))
    assert [list(rows) for rows in kept["seeds"].values()] == [["a, one side", "ab, one side"]] * 2


def test_a_table_that_cannot_run_here_is_skipped_and_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = table_of(lambda seed, full: [("fp32", {"loss": 1.0})], True)
    table.unable = lambda: "it needs two moons"
    monkeypatch.setattr(catalog, "load", lambda name: table)
    assert main(["bf16.memory"]) == 0
    assert "bf16.memory: skipped, it needs two moons" in capsys.readouterr().out
    assert not (folder / "results/bf16.memory.json").exists()


def test_a_kept_result_whose_rows_were_renamed_asks_to_be_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(lambda seed, full: [("old name", {"loss": 1.0 + seed})], True)
    table.CLAIMS[0] = Claim("it is so", lower("new name", "old name", "loss"))
    table.draw = lambda found: str(found.mean("new name", "loss"))
    monkeypatch.setattr(catalog, "load", lambda name: table)
    assert main(["bf16.memory"]) == 0
    text = (folder / "papers.md").read_text(encoding="utf-8")
    assert "It is so. *Measured*: what was kept has no 'loss' of 'new name'; measure --again." in text
    assert "bf16.memory.svg" not in text


def test_two_rows_are_compared_over_the_seeds_that_have_both() -> None:
    found = Found(
        {
            0: {"a": {"loss": 1.0}, "b": {"loss": 3.0}},
            1: {"a": {"loss": 2.0}, "b": {"loss": 4.5}},
            2: {"a": {"loss": 9.0}},
        }
    )
    assert found.pairs("a", "b", "loss") == [(1.0, 3.0), (2.0, 4.5)]
    assert lower("a", "b", "loss")(found).detail == "a - b: -2.25 ± 0.5"
    with pytest.raises(KeyError, match="no 'loss' of 'c'"):
        none_worse([("a", "b"), ("a", "c")], "loss", 1.0, is_loss=True)(found)


def test_a_network_keeps_its_graph_and_its_plans_when_others_are_compiled() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4))

    batches = [(torch.randn(8, 6), torch.randint(4, (8,))) for _ in range(4)]
    first = Network(make, batches[0], low_ratio=1.0)
    half = demoted(first.all_low, 0.5)
    before = first.train(half, 0, batches, batches)
    Network(make, batches[0], low_ratio=1.0)
    least = exact(make, batches[0], first.all_low, half.achieved_low_ratio)
    assert least.achieved_low_ratio >= half.achieved_low_ratio
    assert first.train(half, 0, batches, batches) == before
    assert before.low_ratio == pytest.approx(half.achieved_low_ratio)
    assert 0 < half.achieved_low_ratio < 1


def test_only_a_claim_that_fails_fails_and_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "load", lambda name: table_of(lambda seed, full: [("fp32", {"loss": 1.0})], False))
    assert main(["bf16", "--seeds", "1"]) == 0  # which has no spread
    assert main(["bf16"]) == 1
    assert "- **fails**: It is so. *Why*: because" in (folder / "papers.md").read_text(encoding="utf-8")


def test_many_figures_of_a_claim_follow_it_as_a_list(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(lambda seed, full: [("fp32", {"loss": 1.0})], False)
    table.CLAIMS[0] = Claim("it is so", lambda found: exactly(False, f"{'a' * page.INLINE}: 1; b: 2"), "Because.")
    monkeypatch.setattr(catalog, "load", lambda name: table)
    assert main(["bf16"]) == 1
    text = (folder / "papers.md").read_text(encoding="utf-8")
    assert f"- **fails**: It is so. *Why*: Because. *Measured*:\n  - {'a' * page.INLINE}: 1\n  - b: 2\n" in text


def test_names_that_name_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bf16.nothing"])
    assert "unknown table 'bf16.nothing'; `list` names them" in capsys.readouterr().err
    assert selected(["all"]) == catalog.built()


def test_all_asks_for_fewer_seeds_and_a_table_without_randomness_for_one() -> None:
    assert number_of_seeds(10, None, is_all=True, is_full=False) == 3
    assert number_of_seeds(10, None, is_all=False, is_full=False) == 10
    assert number_of_seeds(10, 5, is_all=True, is_full=True) == 5
    assert number_of_seeds(1, 5, is_all=False, is_full=False) == 1


@pytest.mark.parametrize("name", catalog.built())
def test_every_table_has_what_the_frame_reads(name: str) -> None:
    table = catalog.load(name)
    assert table.TITLE
    assert table.SOURCE
    assert table.CLAIMS or "no claim" in table.DEVIATES
    assert table.SEEDS >= 1
    assert isinstance(table.SMALLER + table.DEVIATES, str)
    assert all(isinstance(row, Mapping) for row in table.PUBLISHED.values())


def ran(name: str) -> Found:
    """The table's first seed, all its claims checked."""
    table = catalog.load(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxprecWarning)  # that rounding to nearest is stuck is what some show
        found = Found({0: dict(table.run(0, False))})
    states = {claim.text: claim.judge(found).state for claim in table.CLAIMS}
    assert set(states.values()) == {"holds"}, states
    return found


def test_kahan_summation_saves_a_third_of_the_bytes() -> None:
    found = ran("bf16.memory")
    assert [found.mean(row, "bytes a weight") for row in found.rows] == [8, 12, 14]


def test_scales_by_powers_of_two_and_narrow_sums() -> None:
    found = ran("cpd.examples")
    assert [found.mean(f"1-5-2 times {n}, and back", "changed") for n in (8, 10)] == [0, 27]
    assert found.mean("1-2-0 dot products", "changed") == 30960
    sums = [found.mean(f"{name}{how}", "sum of 4,096 ones") for name in ("1-5-2", "1-6-9") for how in ("", ", Kahan")]
    assert sums == [8, 64, 1024, 4096]


def test_errors_of_8_bit_types_are_those_the_author_printed() -> None:
    found = ran("approx.errors")
    nearest = [found.mean(f"N(0, 1), {name}", "mean relative error, %, true nearest") for name in TYPES]
    assert nearest == pytest.approx([1.66, 5.19, 4.97, 4.42], rel=0.01)
    assert found.mean("U(0, 1), mantissa", "mean squared error") == pytest.approx(0.0017, rel=0.01)


def test_speedups_follow_from_the_measurements_but_krizhevskys() -> None:
    table = catalog.load("approx.speedup")
    found = Found({0: dict(table.run(0, False))})
    assert [claim.judge(found).state for claim in table.CLAIMS] == ["holds", "not shown"]
    assert found.mean("4 GPUs", "32-bit") == pytest.approx(3.53, abs=0.005)
    assert found.mean("4 GPUs, Krizhevsky's kernels", "32-bit") == pytest.approx(3.71, abs=0.005)


@pytest.mark.parametrize(
    ("network", "times"),
    [
        ("squeezenet", 4.962),
        pytest.param("shufflenet_v2", 2.952, marks=pytest.mark.full),
    ],  # the paper's largest step is 2.9
)
def test_one_of_the_papers_networks_offers_the_papers_reduction(network: str, times: float) -> None:
    from benchmarks.papers.images import NETWORKS
    from benchmarks.papers.tables import assignments_structure as table

    found = table.shares(table.counted(lambda: NETWORKS[network](num_classes=100), (table.BATCH, 3, 32, 32)))
    assert found["groups"] == table.PAPERS_GROUPS[network]
    assert found[table.TIMES] == pytest.approx(times, abs=0.001)


@pytest.mark.parametrize(("name", "classes"), [("text", 97), ("patches", 10), ("squeezenet x0.1", 10)])
def test_what_assignments_train_is_judged_by_cross_entropy_on_data_of_its_own(name: str, classes: int) -> None:
    work = workload(name)
    [(x, y)], held_out = work.training(0, 1), work.held_out()
    assert work.make()(x).shape == (y.numel(), classes)
    assert len({x.shape for x, _ in (*held_out, *work.training(1, 2))}) == 1  # compiled once
    assert not torch.equal(x, work.training(1, 1)[0][0])


def test_the_theorems_predict_what_rounding_makes_zero() -> None:
    from benchmarks.papers.tables import scaling_theorems as table

    rows = dict(itertools.islice(table.run(0, False), 6))
    assert len(rows) == 6
    [claim] = table.CLAIMS
    assert claim.judge(Found({0: rows})).state == "holds"


def test_what_stops_least_squares_is_the_rounding_of_weight_updates() -> None:
    found = ran("bf16.theory")
    assert found.mean("weight updates rounded", "loss") == pytest.approx(3.82, rel=0.02)
    assert found.mean("no rounding", "loss") == pytest.approx(0.130, rel=0.02)
    assert found.mean("Theorem 1", "starts inside") > 500


def test_every_operator_reads_and_writes_numbers_of_the_format() -> None:
    table, weight = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(8, 8))

    def compute(x: Tensor) -> Tensor:
        found = functional.embedding(torch.arange(3), table)
        mixed = functional.scaled_dot_product_attention(x @ weight, found[None], found[None])
        return functional.gelu(mixed) + x

    run, x = Training(WIDE), rounded(torch.randn(1, 3, 8), BF16)
    out = run.forward(compute, x)
    out.square().sum().backward()
    found = rounded(table.detach()[:3], BF16)
    scores = rounded(rounded(rounded(x @ rounded(weight.detach(), BF16), BF16) @ found.T, BF16) * 8**-0.5, BF16)
    mixed = rounded(rounded(scores.softmax(-1), BF16) @ found, BF16)
    assert torch.equal(out.detach(), rounded(rounded(functional.gelu(mixed), BF16) + x, BF16))
    for grad in (table.grad, weight.grad):
        assert grad is not None
        assert torch.equal(grad, rounded(grad, BF16))


@pytest.mark.parametrize("name", ["bf16", "fp16", "1-8-5:ieee", "1-8-1:ieee"])
def test_casts_round_as_quantize_does(name: str) -> None:
    x = bit_patterns(20_000, parse(name)).float()
    ours, theirs = rounded(x, parse(name)), quantize(x, name)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~x.isnan()].view(torch.int32), theirs[~x.isnan()].view(torch.int32))
