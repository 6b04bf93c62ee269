"""What other tools see: torch's structured trace (tlparse), TORCH_LOGS, TORCH_COMPILE_DEBUG, the profiler, Graphviz."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import exit_code
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fxprec import Plan
from fxprec.driver import wrappers
from fxprec.report.dot import dot_text
from fxprec.report.drawing import Drawing
from tests.helpers import compiled, eager_backend, pipeline
from tests.report_pages import made_up

TEXTS = [f"fxprec_{i:02}-{name}" for i, name in enumerate(("joint", *(step.name for step in pipeline.SIMULATION)))]
SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
step = torch.compile(model, backend="fxprec", options={"recipe": "hfp8", "low_ratio": 1.0, "lowering": "eager"})
for x in (torch.randn(3, 4), 1e6 * torch.ones(3, 4), torch.randn(3, 4)):
    step(x).sum().backward()
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A training run with every switch of torch's on: its folder and what it wrote to standard error."""
    place = tmp_path_factory.mktemp("watched")
    switches = {"TORCH_TRACE": str(place / "trace"), "TORCH_LOGS": "+fxprec", "TORCH_COMPILE_DEBUG": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        cwd=place,
        env={**os.environ, **switches},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert run.returncode == 0, run.stderr
    return place, run.stderr


def artifacts(log: Path) -> dict[str, str]:
    """Read the artifacts of a TORCH_TRACE log: payload lines follow their record, indented by a tab."""
    found: dict[str, str] = {}
    name = None
    for line in log.read_text().splitlines():
        if line.startswith("\t"):
            if name is not None:
                found[name] += line[1:] + "\n"
            continue
        record = json.loads(re.sub(r"^.*?\] (?=\{)", "", line))
        name = record.get("artifact", {}).get("name")
        if name is not None:
            found[name] = ""
    return found


def test_plan_and_pass_texts_are_in_torchs_trace(watched):
    place, _ = watched
    (log,) = (place / "trace").iterdir()
    found = artifacts(log)
    assert [n for n in found if n.startswith("fxprec")] == [*TEXTS, "fxprec_plan"]
    assert found[TEXTS[5]].startswith("# 05-insert-casts\n")
    assert "= fxprec.quantize.default(%" in found[TEXTS[5]]
    assert len(json.loads(found["fxprec_plan"])["sites"]) == 15


def test_torch_logs_shows_plan_passes_and_promotions(watched):
    _, said = watched
    assert re.search(
        r"^I.*fxprec/driver/joint_compilation\.py:\d+\].* graph 0: recipe hfp8, simulate storage: 3 of 3 groups low",
        said,
        re.M,
    )
    assert re.search(r"^V.*passes/pipeline\.py:\d+\].* insert-casts: [\d.]+ s, \{'fxprec\.dequantize", said, re.M)
    assert re.search(r"^I.* step 2: promotion of args\.0: 1-4-3\+4 -> 1-6-9: overflow ratio 1$", said, re.M)


def test_torch_compile_debug_holds_a_dump(watched):
    place, _ = watched
    (folder,) = place.glob("torch_compile_debug/run_*/fxprec/graph-0")
    assert Plan.load(folder / "plan.json").promoted
    assert (folder / "report.html").exists()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_the_profiler_names_graph_halves_and_groups():
    step = compiled(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), eager_backend(low_ratio=1.0))
    step(torch.randn(3, 4)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        step(torch.randn(3, 4)).sum().backward()
    events = [(e.name, e.time_range.start, e.time_range.end) for e in seen.events()]
    assert {n for n, _, _ in events if n.startswith("fxprec g")} == {
        "fxprec graph 0 forward", "fxprec graph 0 backward", "fxprec group 0", "fxprec group 1", "fxprec group 2",
    }  # fmt: skip
    ((begin, finish),) = ((start, end) for n, start, end in events if n == "fxprec graph 0 forward")
    inside = [n for n, start, end in sorted(events, key=lambda e: e[1]) if begin <= start and end <= finish]
    assert [n for n in inside if n.startswith("fxprec group")] == ["fxprec group 0", "fxprec group 1", "fxprec group 2"]
    (relu,) = (start for n, start, _ in events if n == "aten::relu")
    assert [n for n, start, end in events if n.startswith("fxprec group") and start <= relu <= end] == [
        "fxprec group 1"
    ]


def test_without_a_profiler_no_range_is_made(monkeypatch):
    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(wrappers, "record_function", refuse)
    compiled(nn.Linear(2, 2), eager_backend(low_ratio=1.0))(torch.ones(1, 2)).sum().backward()


def test_profiled_results_are_those_of_a_run_without():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    step, x = compiled(model, eager_backend(low_ratio=1.0, grad_scaling="none")), torch.randn(3, 4)
    plain = step(x)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        profiled = step(x)
    assert torch.equal(plain, profiled)


def test_debuggers_find_the_code_of_what_the_backend_returned():
    backend, returned = eager_backend(low_ratio=1.0), []

    def noting(gm, inputs):
        returned.append(backend(gm, inputs))
        return returned[0]

    torch.compile(nn.Linear(2, 2), backend=noting)(torch.ones(1, 2))
    assert returned[0].__code__.co_name == "__call__"  # depyf decompiles it


def test_dot_is_one_cluster_a_group_and_quotes_names(tmp_path):
    plan, drawing, _ = made_up(groups=3, nodes=4, name='a"];x\\\n')
    text = dot_text(plan, drawing, "t")
    assert re.findall(r"subgraph (cluster_\d+)", text) == ["cluster_0", "cluster_1", "cluster_2"]
    assert len(re.findall(r"^  n\d+ \[", text, re.M)) == 12
    assert text.count(" -> ") == len(drawing.edges)
    assert r'label="a\"];x\\\n4\naten.mm.default' in text
    if shutil.which("dot"):
        (tmp_path / "graph.dot").write_text(text)
        drawn = subprocess.run(["dot", "-Tplain", tmp_path / "graph.dot"], capture_output=True, text=True, check=True)
        assert len(re.findall(r"^node ", drawn.stdout, re.M)) == 12


def test_report_writes_dot_where_there_is_a_graph(tmp_path, capsys):
    plan, drawing, _ = made_up(groups=2, nodes=4)
    plan.save(tmp_path / "plan.json")
    assert exit_code("report", "--dot", tmp_path) == 2
    assert capsys.readouterr().err.endswith("has no graph.json, which --dot draws; dump the model again\n")
    drawing.save(tmp_path / "graph.json")
    assert Drawing.load(tmp_path / "graph.json", plan) == drawing
    assert exit_code("report", "--dot", tmp_path) == 0
    assert (tmp_path / "graph.dot").read_text() == dot_text(plan, drawing, tmp_path.name)
