"""What a person sees of a plan: one line, a short repr, a table in a notebook; what compiles, with the seconds."""

from __future__ import annotations

import io
import itertools
import logging
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fxprec
from fxprec import Plan
from fxprec.driver import compilation, progress
from fxprec.integrations.statistics import summary
from fxprec.passes.crossings.progress import Progress
from fxprec.plan import ByteCount, PeakBytes
from fxprec.plan.shown import line
from tests.helpers import compiled, eager_backend


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def backend() -> fxprec.Backend:
    torch.manual_seed(0)
    found = eager_backend(recipe="fp8", storage="native")
    step = compiled(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 8)), found)
    step(torch.randn(64, 8)).sum().backward()
    return found


@pytest.fixture
def plan(backend: fxprec.Backend) -> Plan:
    return backend.plans[0]


def test_the_line_has_the_plans_own_figures(plan: Plan) -> None:
    saved = [replace(plan.saved[0], bytes=512, elements=512)] * 3 + [replace(plan.saved[0], bytes=1024, elements=512)]
    known = replace(plan, saved=tuple(saved), saved_bytes=ByteCount(fp32=112 * 1024, planned=28 * 1024))
    said = "3 tensors in 8 bits, 1 in 16"
    assert line([known]) == f"fxprec fp8: 28 KiB saved for backward (bf16 56, float32 112); {said}"
    peak = PeakBytes(budget=24_100_000, high=40_000_000, planned=20_000_000, compiled=23_600_000)
    budgeted = line([replace(known, peak_bytes=peak)])
    assert "; peak 22.5 of 23 MiB (38.1 with everything kept in bf16); " in budgeted
    assert "saved for backward (the same tensors in bf16 56, float32 112); " in budgeted
    assert "; predicted peak 19.1 of 23 MiB (" in line([replace(known, peak_bytes=replace(peak, compiled=None))])
    shared = replace(peak, graphs=2, beside=5_000_000, compiled=None, planned=9_550_000)
    assert "; predicted peak 9.11 of 18.2 MiB (" in line([replace(known, peak_bytes=shared)])


def test_the_line_leaves_out_what_is_not_known(plan: Plan) -> None:
    evaluation = replace(plan, saved_bytes=None, saved=())
    assert line([evaluation], "graph 1") == "fxprec fp8, graph 1, evaluation: nothing is saved for backward"
    assert line([]) == "fxprec: no training step yet; the first one is planned and compiled"
    assert line([plan], "graph 1").startswith("fxprec fp8, graph 1: ")
    assert line([replace(plan, storage="simulate")]).startswith("fxprec fp8, simulated: ")


def test_the_line_adds_graphs_up_and_counts_promotions(plan: Plan) -> None:
    promoted = plan.promote([next(s.id for s in plan.sites if s.kind == "output" and s.format != "bf16")], step=3)
    assert plan.saved_bytes is not None
    both = line([plan, promoted])
    doubled = replace(plan, saved_bytes=ByteCount(fp32=2 * plan.saved_bytes.fp32, planned=2 * plan.saved_bytes.planned))
    assert line([doubled]).partition(";")[0] == both.partition(";")[0]
    assert both.endswith("; 1 promoted")


def test_only_what_is_saved_has_bits(plan: Plan) -> None:
    assert len(plan.sites) > len(plan.saved) == 3
    assert line([plan]).endswith("; 3 tensors in 8 bits"), "what backward does not read is no tensor of the line"
    ways = ("recompute", "offload", *["keep"] * (len(plan.sites) - 2))
    sites = tuple(replace(s, way=way) for s, way in zip(plan.sites, ways, strict=True))
    saved = (replace(plan.saved[0], on_host=True), *plan.saved[1:])
    assert line([replace(plan, sites=sites, saved=saved)]).endswith(
        "; 2 tensors in 8 bits, 1 recomputed, 1 in host memory"
    )
    masks = (replace(plan.saved[0], format="bool", elements=0, fp32=8),) * 2
    assert line([replace(plan, saved=masks)]).endswith("; 2 masks")
    assert line([replace(plan, saved=plan.saved[:1])]).endswith("; 1 tensor in 8 bits")


def test_the_line_is_logged_once_compiled(caplog: pytest.LogCaptureFixture) -> None:
    found = eager_backend(recipe="fp8", storage="native")
    with caplog.at_level(logging.INFO, "fxprec"):
        compiled(nn.Linear(8, 8), found)(torch.randn(4, 8)).sum().backward()
    assert [m for m in caplog.messages if m.startswith(f"{found.summary()}; compiled in ")]


def test_the_seconds_are_those_of_all_plans_that_were_tried(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dropout's mask is in no prediction, so the first plan saves more than the budget."""
    clock = itertools.count(0, 10)  # seconds: each attempt begins and ends with a call
    monkeypatch.setattr(compilation, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found = eager_backend(recipe="fp8", storage="native", activation_budget=80_000, low_ratio=None)
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5)]
    layers.append(nn.Linear(64, 4))
    with caplog.at_level(logging.INFO, "fxprec"):
        compiled(nn.Sequential(*layers), found)(torch.randn(256, 16)).sum().backward()
    assert found.compile_reports[0].seconds == (20,)
    assert f"{found.summary()}; compiled in 20.0 s, 2 plans tried" in caplog.messages


def test_what_it_is_at_is_told_of_training_and_of_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    found = eager_backend(recipe="fp8", storage="native")
    step = compiled(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), found)
    with caplog.at_level(logging.DEBUG, "fxprec.driver.progress"):
        step(torch.randn(4, 8)).sum().backward()
        with torch.no_grad():
            step(torch.randn(4, 8))
    told = [r.getMessage() for r in caplog.records if r.name == "fxprec.driver.progress"]
    halves = ["compiling graph 0, forward half", "compiling graph 0, backward half"]
    evaluation = ["compiling for evaluation: graph 1", "planning graph 1"]
    first = ["compiling graph 0", "planning graph 0", *halves]
    assert told == [*first, *evaluation, "compiling for evaluation: graph 1, forward half"]


def test_the_line_is_of_the_graphs_that_ran_last() -> None:
    """Two sizes compiled twice saved twice as much, said the line and the trainers' logs."""
    found = eager_backend(recipe="fp8", storage="native")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    step = torch.compile(model, backend=found, dynamic=False)
    for size in (64, 32, 64):
        step(torch.randn(size, 8)).sum().backward()
    large, small = found.plans
    assert found.latest_plans == (large,)
    assert found.summary() == f"{line([large])}; 1 more graph for other inputs"
    assert summary(step)["fxprec/saved_bytes"] == large.saved_bytes.planned
    step(torch.randn(32, 8)).sum().backward()
    assert found.latest_plans == (small,)
    other = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), backend=found, dynamic=False)
    other(torch.randn(32, 8)).sum().backward()
    assert found.latest_plans == (small, found.plans[-1]), "another layer's graph is held beside"


def test_where_nothing_is_rounded_the_line_says_so() -> None:
    found = fxprec.Backend(fxprec.Config(recipe="fp32"))
    assert found.summary() == "fxprec fp32: nothing is rounded, and Inductor compiles as without fxprec"


def test_reprs_are_short_and_say_what_is_saved(backend: fxprec.Backend) -> None:
    assert repr(backend.plans[0]) == f"<Plan: {backend.summary()}>"
    assert repr(backend) == f"<Backend, step 1: {backend.summary()}>"
    assert len(repr(backend)) < 200
    nothing = "fxprec: no training step yet; the first one is planned and compiled"
    assert repr(fxprec.Backend()) == f"<Backend, step 0: {nothing}>"


def test_tables_for_notebooks_escape_names(backend: fxprec.Backend) -> None:
    (plan,) = backend.plans
    sites = (
        replace(plan.sites[0], module="<script>"),
        replace(plan.sites[1], module="", source="net.py:7"),
        *plan.sites[2:],
    )
    shown = replace(plan, sites=sites)._repr_html_()
    assert ">net.py:7<" in shown, "a tensor that no module made is named by its line"
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert "saved for backward" in backend._repr_html_()
    assert "no training step yet" in fxprec.Backend()._repr_html_()


def test_a_diagnosis_is_shown_short_and_escaped() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
    found = fxprec.doctor(model, torch.randn(32, 8), options={"formats": ("e4m3fn",), "reruns": 0})
    assert repr(found).startswith(f"<Diagnosis: Sequential, loss {found.loss:.4g}, {len(found.ranking)} stored tensors")
    assert len(repr(found)) < 300
    hostile = replace(found, model="<b>", ranking=(replace(found.ranking[0], tensor="<i>"),))
    assert "<td style='text-align:left'>&lt;i&gt;</td>" in hostile._repr_html_()
    assert "<b>&lt;b&gt;: loss" in hostile._repr_html_()


def test_logs_carry_the_bytes_saved() -> None:
    options = {"recipe": "fp8", "lowering": "eager"}
    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend="fxprec", options=options)
    model(torch.randn(4, 8)).sum().backward()
    (plan,) = fxprec.backend_of(model).plans
    assert plan.saved_bytes is not None
    assert plan.saved_bytes.planned > 0
    assert summary(model)["fxprec/saved_bytes"] == plan.saved_bytes.planned
    assert summary(model)["fxprec/saved_bytes_in_bf16"] == plan.saved_bytes.bf16


def test_logs_carry_the_peak_and_its_budget() -> None:
    options = {"recipe": "fp8", "lowering": "eager", "peak_budget": "1MiB"}
    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), backend="fxprec", options=options)
    model(torch.randn(4, 8)).sum().backward()
    (plan,) = fxprec.backend_of(model).plans
    assert plan.peak_bytes is not None
    found = summary(model)
    assert (found["fxprec/peak_bytes"], found["fxprec/peak_budget"]) == (plan.peak_bytes.planned, 2**20)
    measured = replace(plan.peak_bytes, compiled=2 * plan.peak_bytes.planned)
    assert measured.held == 2 * plan.peak_bytes.planned


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Put a terminal in the place of standard error; no fixture, since pytest replaces the stream after those."""
    err = Terminal()
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    monkeypatch.setattr(progress, "Progress", lambda: Progress(quiet_s=-1.0))
    progress.announce.cache_clear()
    return err


def test_a_terminal_shows_what_compiles_and_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with progress.telling("compiling graph 0"):
        time.sleep(0.1)
        with progress.telling("planning graph 0"):
            time.sleep(0.1)
        with progress.telling("planning graph 1", has_own_line=True):
            time.sleep(0.1)
    shown = terminal.getvalue()
    assert "\r\x1b[Kfxprec: compiling graph 0, 0 s" in shown
    assert "fxprec: planning graph 0, 0 s" in shown
    assert "graph 1" not in shown
    assert shown.endswith("\r\x1b[K")


def test_what_ends_in_an_error_takes_its_line_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with pytest.raises(ZeroDivisionError), progress.telling("compiling graph 0"):
        time.sleep(0.1) or 1 / 0  # type: ignore[func-returns-value]
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert progress._ticker is None


def in_a_log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Make standard error a file, and lines due at once."""
    err = io.StringIO()
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.01)
    monkeypatch.setattr(progress, "EACH_LINE_S", 0.02)
    progress.announce.cache_clear()
    return err


def test_a_log_gets_plain_lines_of_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    err = in_a_log(monkeypatch)
    with progress.telling("compiling graph 0"), progress.telling("planning graph 0", has_own_line=True):
        while err.getvalue().count("\n") < 2:
            time.sleep(0.01)
    assert err.getvalue() == "fxprec: planning graph 0, 0 s so far\n" * err.getvalue().count("\n")
    assert not [t for t in threading.enumerate() if t.name == "fxprec progress"]
    progress.announce("fxprec fp8: 1 KiB")
    assert "1 KiB" not in err.getvalue(), "the summary is in the log at level INFO"


def test_a_log_gets_the_first_line_after_half_a_minute_and_one_a_minute_then() -> None:
    ticker, waited = progress._Ticker("compiling graph 0", has_own_line=False), []
    ticker._ended = SimpleNamespace(wait=lambda s: waited.append(s) or len(waited) == 3)  # type: ignore[assignment,func-returns-value]
    ticker._write_lines()
    assert waited == [30, 60, 60]


@pytest.mark.parametrize("make", [in_a_log, on_terminal])
@pytest.mark.parametrize("how", ["level", "rank"])
def test_a_level_above_warning_and_another_rank_than_0_show_nothing(make, how, monkeypatch, caplog) -> None:
    err = make(monkeypatch)
    if how == "level":
        caplog.set_level(logging.ERROR, "fxprec")
    else:
        monkeypatch.setenv("RANK", "1")
    with progress.telling("compiling graph 0"):
        time.sleep(0.1)
        Progress(quiet_s=-1.0).show("search 3")
    progress.announce("fxprec fp8: 1 KiB")
    assert err.getvalue() == ""


def test_a_line_is_announced_once_and_by_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    for _ in range(2):
        progress.announce("fxprec fp8: 1 KiB")
    assert terminal.getvalue() == "fxprec fp8: 1 KiB\n"
    monkeypatch.setenv("RANK", "1")
    progress.announce("fxprec fp8: 2 KiB")
    assert "2 KiB" not in terminal.getvalue()
