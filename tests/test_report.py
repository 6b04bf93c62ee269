"""`report.html` and what it is drawn from: the graph, the ratio curve, the statistics."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from command_line import exit_code
from torch import nn

from fxprec import Plan
from fxprec.config.recipes import FP8
from fxprec.errors import PlanError
from fxprec.numerics import formats
from fxprec.plan import Group, KindCounts
from fxprec.report.curve import by_group, by_ratio, rounding_error
from fxprec.report.drawing import Drawing, cost_of
from fxprec.report.history import read_history
from fxprec.report.html import report_html
from tests.helpers import compiled, eager_backend


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(h + h.relu())


@pytest.fixture(scope="module", params=["simulate", "packed"])
def trained(request, tmp_path_factory):
    """A dump of three steps of a small residual network."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("trained")
    step = compiled(Residual(), eager_backend(dump=place, low_ratio=1.0, storage=request.param))
    for _ in range(3):
        step(torch.randn(3, 4)).sum().backward()
    folder = place / "graph-0"
    plan = Plan.load(folder / "plan.json")
    drawing = Drawing.load(folder / "graph.json", plan)
    assert drawing is not None
    return SimpleNamespace(folder=folder, plan=plan, drawing=drawing)


def data_of(page: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(found)


def test_the_drawing_has_the_models_edges_and_none_of_our_casts(trained):
    nodes = trained.drawing.nodes
    assert not [n.op for n in nodes if "fxprec" in n.op]
    at = {n.name: i for i, n in enumerate(nodes)}
    edges = {(nodes[a].name, nodes[b].name) for a, b in trained.drawing.edges}
    assert {("addmm", "relu"), ("addmm", "add"), ("relu", "add"), ("add", "addmm_1"), ("x", "addmm")} <= edges
    assert all(a < b for a, b in trained.drawing.edges)
    assert [nodes[at[name]].group for name in ("x", "addmm", "relu", "add", "addmm_1")] == [0, 1, 1, 1, 2]


def test_every_site_stands_at_the_node_it_stores(trained):
    drawn = {s: n for n in trained.drawing.nodes for s in n.sites}
    assert set(drawn) == {s.id for s in trained.plan.sites}
    for site in trained.plan.sites:
        node = drawn[site.id]
        assert node.backward == (site.direction == "backward")
        assert node.elements == site.elements
        if site.direction == "forward":
            assert (node.name, node.group) == (site.tensor, site.group)


def test_gemms_have_the_work_of_their_shapes(trained):
    first, last = trained.drawing.gemms
    assert first is not None
    assert last is not None
    assert (first.flops, last.flops) == (2 * 3 * 4 * 8, 2 * 3 * 8 * 2)
    assert [[trained.drawing.nodes[i].name, n] for i, n in last.operands] == [["add", 24], ["last.weight", 16]]
    assert last.result == 6


def test_saved_bytes_by_group_add_up_to_the_plans(trained):
    assert sum(g.saved_bytes for g in trained.plan.groups) == trained.plan.saved_bytes.planned
    mask = 24  # of the ReLU, a byte each
    assert 4 * sum(g.saved_elements for g in trained.plan.groups) + mask == trained.plan.saved_bytes.fp32


def test_the_page_holds_graph_and_statistics_and_is_the_same_again(trained, capsys):
    page = (trained.folder / "report.html").read_text()
    assert exit_code("report", trained.folder) == 0
    again = (trained.folder / "report.html").read_text()
    data = data_of(again)
    assert {**data, "history": []} == data_of(page)  # written before the first statistics
    assert len(data["nodes"]) == len(trained.drawing.nodes)
    assert {tuple(h["steps"]) for h in data["history"]} == {(1, 2)}
    history = read_history(trained.folder / "stats.jsonl", len(trained.plan.sites))
    title = f"Residual (graph-0): {trained.plan.recipe.name}, {trained.plan.storage} storage"
    assert again == report_html(trained.plan, title=title, drawing=trained.drawing, history=history)


def test_names_stay_text(trained):
    bad = "</script><script>alert(1)</script>\"'<!--{{data}}"
    nodes = tuple(replace(n, name=bad, module=bad) for n in trained.drawing.nodes)
    sites = tuple(replace(s, module=bad, tensor=bad) for s in trained.plan.sites)
    hostile = replace(trained.plan, sites=sites)
    page = report_html(hostile, title=bad, drawing=replace(trained.drawing, nodes=nodes))
    assert page.count("<script") == 2 == page.count("</script>")
    assert page.count("<!") == 1
    assert not re.search(r"(?:src|href)=[\"'](?!data:,|#)|url\((?!#)|@import", page)
    data = data_of(page)
    assert data["texts"][data["sites"][0][2]] == data["title"] == bad


def group(number: int, elements: int, saved: int, order: int) -> Group:
    counts = KindCounts(output=elements)
    return Group(id=number, elements=elements, elements_by_kind=counts, low=False, order=order, saved_elements=saved)


def test_the_curve_counts_elements_and_bytes_in_the_order_of_demotion():
    plan = Plan(recipe=FP8, groups=(group(0, 10, 10, 1), group(1, 30, 20, 0)), total_elements=40)
    points = by_group(plan, damage=(0.5, 0.25))
    assert [(p.groups, p.reached, p.saved_bytes, p.damage) for p in points] == [
        (0, 0.0, 60, 0.0),
        (1, 0.75, 40, 0.25),
        (2, 1.0, 30, 0.75),
    ]
    assert [p.groups for p in by_ratio(points)] == [1] * 7 + [2] * 3
    bf16, e4m3 = rounding_error(formats.BF16), rounding_error(formats.E4M3FN)
    assert points[1].error == pytest.approx(math.sqrt(0.25 * bf16**2 + 0.75 * e4m3**2))


@pytest.mark.parametrize("fmt", [formats.E4M3FN, formats.E5M2, formats.BF16], ids=lambda f: f.name)
def test_predicted_rounding_error_is_that_of_torchs_own_rounding(fmt):
    x = torch.exp2(torch.rand(200_000, dtype=torch.float64) * 8 - 4)  # log-uniform, in range of all three
    rounded = x.float().to(fmt.torch_dtype).double()
    measured = ((rounded - x) / x).square().mean().sqrt().item()
    assert rounding_error(fmt) == pytest.approx(measured, rel=0.01)


def write_stats(path, rows: int, steps: int) -> None:
    ratios = {"overflow_ratio": 0.25, "underflow_ratio": "nan"}
    lines = [{"step": s, "row": r, "site": 0, "amax": 8.0, **ratios} for s in range(steps) for r in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9')


def test_history_is_thinned_keeps_its_ends_and_leaves_out_half_a_line(tmp_path):
    write_stats(tmp_path / "stats.jsonl", rows=2, steps=1000)
    history = read_history(tmp_path / "stats.jsonl", sites=1)
    assert [h["row"] for h in history] == [0, 1]
    steps = history[0]["steps"]
    assert (len(steps), steps[0], steps[-1]) == (200, 0, 999)
    assert (history[0]["amax"][0], history[0]["overflow"][0], history[0]["underflow"][0]) == (3.0, 0.25, None)
    assert read_history(tmp_path / "none.jsonl", sites=1) == []


@pytest.mark.parametrize("damage", ["{", '{"schema": 2}', '{"schema": 1, "nodes": [[1]], "edges": []}', "nodes", "nan"])
def test_a_graph_that_is_not_whole_is_one_line(trained, tmp_path, damage):
    data = json.loads((trained.folder / "graph.json").read_text())
    if damage == "nodes":  # of another plan
        data["nodes"][0][5] = 99
        damage = json.dumps(data)
    if damage == "nan":
        damage = json.dumps(data | {"damage": [math.nan] * len(trained.plan.groups)})
    (tmp_path / "graph.json").write_text(damage)
    with pytest.raises(
        PlanError, match=r"graph\.json: is not a graph that fxprec wrote \(.*\); dump the model again"
    ) as e:
        Drawing.load(tmp_path / "graph.json", trained.plan)
    assert "\n" not in str(e.value)


def test_statistics_of_another_plan_are_one_line(tmp_path):
    write_stats(tmp_path / "stats.jsonl", rows=1, steps=1)
    with pytest.raises(
        PlanError, match=r"stats\.jsonl: line 1 is not a line of statistics of this plan; dump the model"
    ):
        read_history(tmp_path / "stats.jsonl", sites=0)


def test_statistics_are_read_line_by_line_up_to_a_limit(tmp_path, monkeypatch):
    write_stats(tmp_path / "stats.jsonl", rows=1, steps=1)
    monkeypatch.setattr("fxprec.report.load.MAX_LINE", 50)
    with pytest.raises(PlanError, match="line 1 is not a line of statistics of this plan"):
        read_history(tmp_path / "stats.jsonl", sites=1)
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert read_history(tmp_path / "pipe.jsonl", sites=1) == [], "opening a pipe would wait for its writer"


@pytest.mark.parametrize(
    "entry", [{"amax": 10**400}, {"scale_exponent": math.inf}, {"underflow_ratio": []}, {"step": -1}, {"site": 0.5}]
)
def test_a_statistic_that_no_page_could_show_is_one_line(entry, tmp_path):
    write_stats(tmp_path / "stats.jsonl", rows=1, steps=1)
    row = json.loads((tmp_path / "stats.jsonl").read_text().splitlines()[0])
    (tmp_path / "stats.jsonl").write_text(json.dumps(row | entry) + "\n")
    with pytest.raises(PlanError, match="line 1 is not a line of statistics of this plan"):
        read_history(tmp_path / "stats.jsonl", sites=1)


def test_a_bare_plan_is_drawn_without_edges(trained):
    data = data_of(report_html(trained.plan, title="bare"))
    assert (data["nodes"], data["edges"]) == (None, [])


def test_attention_counts_both_of_its_products():
    graph = torch.fx.Graph()
    operands = [graph.placeholder(name) for name in "qkv"]
    for node, length in zip(operands, (5, 6, 6), strict=True):
        node.meta["val"] = torch.empty(2, 3, length, 7, device="meta")
    attention = graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, tuple(operands))
    cost = cost_of(attention, {node: i for i, node in enumerate(operands)})
    assert cost.flops == 2 * (2 * 3) * (5 * 7 * 6 + 5 * 6 * 7)  # Q K^T, then its product with V
    assert cost.operands == ((0, 210), (1, 252), (2, 252))
