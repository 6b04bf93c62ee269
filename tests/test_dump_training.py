"""Dump folders while training: statistics thinned, ranks apart, everything written anew after a re-lowering."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fxprec import Plan
from fxprec.errors import ConfigError
from fxprec.numerics import formats
from fxprec.report import folder as folders
from fxprec.report.drawing import Drawing
from fxprec.report.dump_folder import DumpFolder
from fxprec.runtime.stats import SiteStats
from tests.helpers import compiled, eager_backend, one_rank

SITE = SimpleNamespace(id=3, tensor="relu", format="e4m3fn")


def controller(step: int, rows: int) -> SimpleNamespace:
    """What the dump reads of a controller at the start of a step: fresh statistics of ``rows`` casts."""
    latest = {i: SiteStats(i, 0.5, 0.25, math.inf) for i in range(rows)}
    return SimpleNamespace(step=step, latest=latest, scale_of=lambda row: None, site_of=lambda row: SITE)


def test_after_each_so_many_lines_half_as_many_steps_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "THIN_AFTER", 8)
    dump = DumpFolder(tmp_path).graph(0)
    dump.start()
    for step in range(1, 66):
        dump.write_stats(controller(step, rows=2))
    rows = [json.loads(line) for line in (tmp_path / "graph-0/stats.jsonl").read_text().splitlines()]
    steps = [r["step"] for r in rows if r["row"] == 0]
    # 8 lines are 4 steps of 2: each of the first, then every second, fourth, eighth and sixteenth
    assert steps == [0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 56, 64]
    assert [r["row"] for r in rows] == [0, 1] * len(steps)
    assert rows[0] == {
        "step": 0, "row": 0, "site": 3, "tensor": "relu", "format": "e4m3fn",
        "amax": "inf", "overflow_ratio": 0.5, "underflow_ratio": 0.25,
    }  # fmt: skip


def test_statistics_seen_before_are_not_written_again(tmp_path):
    dump = DumpFolder(tmp_path).graph(0)
    dump.start()
    seen = controller(1, rows=2)
    dump.write_stats(seen)
    seen.step, seen.latest[1] = 2, SiteStats(1, 0.0, 0.0, 1.0)
    dump.write_stats(seen)
    rows = [json.loads(line) for line in (tmp_path / "graph-0/stats.jsonl").read_text().splitlines()]
    assert [(r["step"], r["row"]) for r in rows] == [(0, 0), (0, 1), (1, 1)]


def test_a_statistic_that_was_not_counted_is_null(tmp_path):
    dump = DumpFolder(tmp_path).graph(0)
    dump.start()
    unknown = controller(1, rows=0)
    unknown.latest[0] = SiteStats(0, 0.0, math.nan, 1.0)
    dump.write_stats(unknown)
    row = json.loads((tmp_path / "graph-0/stats.jsonl").read_text())
    assert (row["overflow_ratio"], row["underflow_ratio"]) == (0.0, None)


def test_each_rank_has_its_folder(tmp_path):
    with one_rank():
        compiled(nn.Linear(2, 2), eager_backend(dump=tmp_path, low_ratio=1.0))(torch.ones(1, 2))
    assert [p.name for p in tmp_path.iterdir()] == ["rank-0"]
    assert (tmp_path / "rank-0/graph-0/plan.json").exists()


@pytest.fixture
def promoted(tmp_path):
    """Two steps in range, one beyond it and two after the re-lowering that follows, in packed storage."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    backend = eager_backend(dump=tmp_path, low_ratio=1.0, storage="packed")
    step = compiled(model, backend)
    texts = []
    for factor in (1, 1, 1e6, 1, 1):
        step(factor * torch.randn(3, 4)).sum().backward()
        texts.append(max((tmp_path / "graph-0").glob("*.txt")).read_text())
    return SimpleNamespace(backend=backend, folder=tmp_path / "graph-0", texts=texts)


def test_a_re_lowering_writes_texts_plan_graph_and_report_anew(promoted):
    plan, before, after = promoted.backend.plans[0], promoted.texts[0], promoted.texts[-1]
    assert [e.kind for e in promoted.backend.events].count("relowering") == 1
    moved = plan.promoted
    assert moved
    for site in moved:
        assert f"site {site.id} {formats.HFP8_143.name}" in before
        assert f"site {site.id} {plan.recipe.hi.name}" in after
    assert Plan.load(promoted.folder / "plan.json") == plan
    assert Drawing.load(promoted.folder / "graph.json", plan) is not None
    page = (promoted.folder / "report.html").read_text()
    assert f"promoted to {plan.recipe.hi.name} at step {moved[0].promoted_at}" in page


def test_statistics_go_on_through_a_re_lowering(promoted):
    rows = [json.loads(line) for line in (promoted.folder / "stats.jsonl").read_text().splitlines()]
    assert sorted({r["step"] for r in rows}) == [1, 2, 3, 4]
    formats_of = {r["format"] for r in rows if r["site"] == promoted.backend.plans[0].promoted[0].id}
    assert formats_of == {formats.HFP8_143.name, promoted.backend.plans[0].recipe.hi.name}


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^dump: .*file/graph-0: cannot be written: Not a directory; choose a writ"):
        DumpFolder(tmp_path / "file").graph(0).start()
