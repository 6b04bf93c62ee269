"""Dump folders, `fxprec dump`, `diff`, `explain`, `report`."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import exit_code
from torch import nn

from fxprec import Plan
from fxprec.plan import PeakBytes
from fxprec.report.compare import data, differences, moves
from tests.helpers import compiled, eager_backend, pipeline

NAMES = [f"{i:02}-{name}" for i, name in enumerate(("joint", *(step.name for step in pipeline.SIMULATION)))]
FACTORY = """import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(3, 4)

def keywords():
    model, x = make()
    return model, {"input": x}

def frozen():
    model, x = make()
    return model.requires_grad_(False), x

def wrong():
    return 3

def broken():
    class Reads(nn.Module):
        def forward(self, x):
            raise ValueError("cannot go on")
    return Reads(), torch.ones(2)
"""

WIDE = """import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.ones(512, 64)
"""


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """Two dumps of one small model, at different ratios."""
    place = tmp_path_factory.mktemp("dumps")
    (place / "net.py").write_text(FACTORY)
    for name, ratio in (("a", 0.5), ("again", 0.5), ("b", 1.0)):
        torch._dynamo.reset()
        target = f"{place}/net.py:make"
        assert exit_code("dump", target, "--out", place / name, "--recipe", "hfp8", "--low-ratio", ratio) == 0
    return place


def test_one_text_a_pass_the_plan_and_the_report(dumped):
    names = sorted(p.name for p in (dumped / "a" / "graph-0").iterdir())
    assert names == [*(f"{n}.txt" for n in NAMES), "graph.json", "plan.json", "report.html"]
    assert Plan.load(dumped / "a" / "graph-0" / "plan.json").storage == "simulate"


def test_a_second_dump_has_the_same_bytes(dumped):
    first, second = ({p.name: p.read_bytes() for p in (dumped / d / "graph-0").iterdir()} for d in ("a", "again"))
    assert first == second


def test_text_names_shapes_formats_sites_modules_and_lines(dumped):
    joint = (dumped / "a" / "graph-0" / "00-joint.txt").read_text()
    assert "input : float32 8 x 4  # param 0.weight" in joint
    assert "fxprec" not in re.sub("fxprec_table", "", joint)
    assert re.search(r"f addmm = aten\.addmm\.default\(%\w+, %\w+, %\w+\) : float32 3 x 8  # module 0", joint)
    casts = (dumped / "a" / "graph-0" / "05-insert-casts.txt").read_text()
    plan = Plan.load(dumped / "a" / "graph-0" / "plan.json")
    assert re.findall(r"^# fxprec\.quantize\S*: 0 -> (\d+)$", casts, re.M) == [
        str(len(re.findall(r"= fxprec\.quantize", casts)))
    ]
    said = {(int(i), f) for i, f in re.findall(r"# .*?site (\d+) (\S+?)(?:,|$)", casts, re.M)}
    assert said == {(s.id, s.format) for s in plan.sites}


def test_dump_option_in_training_writes_statistics_and_no_warning(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    backend = eager_backend(dump=tmp_path / "d", low_ratio=1.0)
    step = compiled(model, backend)
    for _ in range(3):
        step(torch.randn(3, 4)).sum().backward()
    rows = [json.loads(line) for line in (tmp_path / "d/graph-0/stats.jsonl").read_text().splitlines()]
    assert {r["step"] for r in rows} == {1, 2}
    assert len(rows) == len({(r["step"], r["row"]) for r in rows})
    fields = {"step", "row", "site", "tensor", "format", "amax", "overflow_ratio", "underflow_ratio"}
    assert fields <= rows[0].keys()
    assert Plan.load(tmp_path / "d/graph-0/plan.json") == backend.plans[0]


def test_the_graph_of_an_evaluation_is_told_from_those_of_training(tmp_path, capsys):
    backend = eager_backend(dump=tmp_path, low_ratio=1.0)
    step = compiled(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), backend)
    step(torch.randn(3, 4)).sum().backward()
    with torch.no_grad():
        step(torch.randn(3, 4))
    note = "evaluation: the graph has no backward half, so nothing is saved for it"
    for graph, is_evaluation in (("graph-0", False), ("graph-1", True)):
        plan = Plan.load(tmp_path / graph / "plan.json")
        assert plan.is_evaluation == (note in plan.notes) == is_evaluation
        page = (tmp_path / graph / "report.html").read_text()
        assert f"Sequential ({graph}{', evaluation' * is_evaluation}): " in page
    assert exit_code("explain", tmp_path / "graph-1") == 0
    assert capsys.readouterr().out.startswith("fxprec hfp8, simulated, evaluation: nothing is saved for backward")
    assert exit_code("explain", tmp_path) == 2
    assert capsys.readouterr().err.endswith("holds 2 graphs; give one of graph-0, graph-1 (evaluation) in it\n")


def test_a_dump_says_that_a_graph_is_of_an_evaluation(dumped, tmp_path, capsys):
    assert exit_code("dump", f"{dumped}/net.py:frozen", "--out", tmp_path) == 0
    said = "  evaluation: no backward half, so nothing is held for it"
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "graph-0"), said]


@pytest.mark.parametrize("command", ["dump", "export"])
def test_what_a_plan_does_not_fulfil_is_told_on_standard_error(dumped, tmp_path, capsys, command):
    arguments = ("--recipe", "fp8", "--keep-high", "heads", "--out", tmp_path / "out")
    assert exit_code(command, f"{dumped}/net.py:make", *arguments) == 0
    assert "not done: assign-precision: keep_high pattern 'heads' matches no module" in capsys.readouterr().err


def test_the_environment_names_the_folder_too_and_a_second_model_gets_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("FXPREC_DUMP", str(tmp_path))
    for _ in range(2):
        compiled(nn.Linear(2, 2), eager_backend(low_ratio=1.0))(torch.ones(1, 2))
    assert (tmp_path / "graph-0/plan.json").exists()
    assert (tmp_path / "model-1/graph-0/plan.json").exists()


def test_diff_is_0_where_equal_1_where_not_and_counts_bytes(dumped, capsys):
    assert exit_code("diff", dumped / "a", dumped / "again") == 0
    assert capsys.readouterr().out == ""
    assert exit_code("diff", dumped / "a", dumped / "b" / "graph-0" / "plan.json") == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "requested_low_ratio: 0.5 -> 1.0"
    a, b = (Plan.load(dumped / d / "graph-0/plan.json") for d in ("a", "b"))
    changed = [x for x, y in zip(a.sites, b.sites, strict=True) if x.format != y.format]
    # hfp8: 16 bits high (1-6-9), 8 low, and the larger ratio only lowers
    assert changed
    assert said[-1] == f"{len(changed)} tensors moved, {-sum(s.elements for s in changed):+,} bytes"
    assert sum(" is low in the second" in line for line in said) == len(changed)


def test_diff_as_json_has_the_tensors_that_moved_as_rows(dumped, capsys):
    assert exit_code("diff", dumped / "a", dumped / "b", "--json") == 1
    (found,) = json.loads(capsys.readouterr().out)["graphs"].values()
    moved, last = found["moved"], found["differences"][-1]
    assert last == f"{len(moved)} tensors moved, {sum(m['bytes'] for m in moved):+,} bytes"
    assert {(m["before"], m["after"]) for m in moved} == {("1-6-9", "1-4-3+4"), ("1-6-9", "1-5-2")}
    assert all(m["why"].endswith(" is low in the second") for m in moved)
    assert exit_code("diff", dumped / "a", dumped / "again", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["graphs"].values()
    assert found == {"moved": [], "differences": []}


def test_diff_names_a_promotion_as_the_cause(dumped):
    plan = Plan.load(dumped / "b/graph-0/plan.json")
    site = next(s for s in plan.sites if s.kind == "output" and s.format != plan.recipe.hi.name)
    (move,) = moves(plan, plan.promote([site.id], step=7))
    assert (move.why, move.bytes) == ("promoted at step 7 of the second", site.elements)


def test_diff_finds_what_is_no_format(dumped, tmp_path, capsys):
    plan = Plan.load(dumped / "a/graph-0/plan.json")
    gemm, site = replace(plan.gemms[1], pays=True, why="so\nit is"), replace(plan.sites[2], source="model.py:7")
    edited = replace(
        plan,
        groups=(replace(plan.groups[0], order=9), *plan.groups[1:]),
        gemms=(plan.gemms[0], gemm),
        sites=(*plan.sites[:2], site, *plan.sites[3:]),
    )
    edited.save(tmp_path / "edited.json")
    assert exit_code("diff", dumped / "a", tmp_path / "edited.json") == 1
    was, old = plan.gemms[1], plan.sites[2]
    assert capsys.readouterr().out.splitlines() == [
        f"GEMM 1 ({was.op}, {was.module}): pays none -> True, why {was.why} -> so\\nit is",
        f"group 0: order {plan.groups[0].order} -> 9",
        f"{old.tensor} ({old.kind}): source {old.source or 'none'} -> model.py:7",
    ]


def test_diff_finds_what_only_one_of_the_plans_says(dumped):
    plan = Plan.load(dumped / "a/graph-0/plan.json")
    peak = PeakBytes(budget=9, high=9, planned=7, live=((10**6,) * 6,) * 100)
    gemm, site = replace(plan.gemms[1], operands_why="by hand"), replace(plan.sites[2], way="keep")
    sites = (*plan.sites[:2], site, *plan.sites[3:])
    other = replace(plan, grouping="dataflow", peak_bytes=peak, gemms=(plan.gemms[0], gemm), sites=sites)
    here, there = list(differences(plan, other)), list(differences(other, plan))
    assert here.pop(1) == (
        "peak_bytes: budget none -> 9, high none -> 9, planned none -> 7, live differs, kept differs, seconds none -> 0.0"
    )
    assert here == [
        "grouping: execution -> dataflow",
        f"GEMM 1 ({gemm.op}, {gemm.module}): operands_why none -> by hand",
        f"{site.tensor} ({site.kind}): way none -> keep",
    ]
    assert there.pop(1).startswith("peak_bytes: budget 9 -> none, ")
    assert there == [re.sub(r"(\S+) -> (by hand|\S+)", r"\2 -> \1", line) for line in here]
    less = replace(other, peak_bytes=replace(peak, planned=5))
    assert not list(differences(plan, replace(plan, model="")))
    assert list(differences(other, less)) == ["peak_bytes: planned 7 -> 5"]


def test_diff_says_what_a_budget_has_moved(tmp_path, monkeypatch):
    """By the bytes that each plan saves, also where a tensor that was never saved gets a way."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(WIDE)
    plans = []
    for name, budget in (("free", []), ("bound", ["--peak-budget", "75%"])):
        assert exit_code("dump", "net.py:make", "--recipe", "fp8", "--out", name, *budget) == 0
        plans.append(Plan.load(tmp_path / name / "graph-0/plan.json"))
    free, bound = plans
    found = data(free, bound)
    moved = {row["tensor"]: row for row in found["moved"]}
    lost = {s.tensor: s for s in bound.sites if s.way == "recompute" and any(r.site == s.id for r in free.saved)}
    assert lost
    for name, site in lost.items():
        size = sum(row.bytes for row in free.saved if row.site == site.id)
        assert (moved[name]["after"], moved[name]["bytes"]) == ("recomputed", -size)
        assert moved[name]["why"] == "chosen under a peak budget of the second"
    assert not any("{" in line for line in found["differences"])
    back = {row["tensor"]: -row["bytes"] for row in data(bound, free)["moved"]}
    assert back == {name: row["bytes"] for name, row in moved.items()}


def test_diff_shows_the_first_of_many_and_counts_the_others(dumped):
    plan = Plan.load(dumped / "a/graph-0/plan.json")
    many = replace(plan, groups=tuple(replace(plan.groups[0], id=i) for i in range(50)))
    said = list(differences(many, replace(many, groups=tuple(replace(g, order=99) for g in many.groups))))
    assert said[0].startswith("group 0: order ")
    assert said[20:] == ["groups: 30 more with other fields"]
    assert next(differences(plan, many)) == "groups: 3 -> 50"


def test_explain_gives_the_reason(dumped, capsys):
    plan = Plan.load(dumped / "b/graph-0/plan.json")
    promoted = next(s for s in plan.sites if s.kind == "output" and s.format != plan.recipe.hi.name)
    plan.promote([promoted.id], step=7).save(dumped / "promoted.json")
    assert exit_code("explain", dumped / "promoted.json", promoted.tensor) == 0
    said = capsys.readouterr().out
    assert f"promoted to {plan.recipe.hi.name} at step 7" in said
    assert f"group {promoted.group} of 3, " in said
    assert "policy 'size', which reached 1 for low_ratio 1.0" in said
    low = next(s for s in plan.sites if s.kind == "param")
    assert exit_code("explain", dumped / "b", low.id) == 0
    assert f"recipe 'hfp8' holds a low param in {plan.recipe.lo_forward.name}" in capsys.readouterr().out


def test_explain_prints_what_is_held_as_text_and_as_json(dumped, capsys):
    plan = Plan.load(dumped / "a/graph-0/plan.json")
    assert exit_code("explain", dumped / "a") == 0
    assert capsys.readouterr().out == plan.explain() + "\n"
    assert exit_code("explain", dumped / "a", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(row["bytes"] for row in told["saved"]) == told["total"]["planned"] == plan.saved_bytes.planned
    assert exit_code("explain", dumped / "a", "lowering", "--json") == 0
    assert json.loads(capsys.readouterr().out)["lines"] == plan.explain("lowering").split("\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["diff", "{d}/a", "{d}/none"], "{d}/none: cannot be read: No such file or directory; give the path of a plan file"),
        (["diff", "{d}/a", "{d}/empty"], "{d}/empty: holds no dump (no graph-0); give a folder that dump= or fxprec dump wrote"),
        (["report", "{d}/half"], "{d}/half/graph-0: has no plan.json, so this compilation did not end; dump the model again"),
        (["explain", "{d}/a", "addm"], "'addm' is not a tensor or module of this plan; did you mean 'addmm'?; plan.sites and the dump's texts list them"),
        (["explain", "{d}/a", "9" * 5000], "'" + "9" * 5000 + "' is not a tensor or module of this plan; plan.sites and the dump's texts list them"),
        (["explain", "{d}/a", "a\n"], "'a\\n' is not a tensor or module of this plan; plan.sites and the dump's texts list them"),
        (["dump", "net.py"], "target 'net.py' names no factory; give path/file.py:factory or module:callable"),
        (["dump", "{d}/net.py:mak"], "target '{d}/net.py:mak': {d}/net.py has no callable 'mak'; did you mean 'make'?; give path/file.py:factory or module:callable"),
        (["dump", "{d}/net.py:wrong", "--out", "{d}/w"], "target '{d}/net.py:wrong' returned int; let it return (model, example inputs), the inputs a tensor, a tuple or a dict of keywords"),
        (["dump", "{d}/net.py:make", "--recipe", "fp32"], "recipe 'fp32' holds everything in float32, so there is nothing to plan; choose 'fp8'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_2(arguments, said, dumped, capsys):
    (dumped / "empty").mkdir(exist_ok=True)
    (dumped / "half/graph-0").mkdir(parents=True, exist_ok=True)
    assert exit_code(*(a.format(d=dumped) for a in arguments)) == 2
    assert capsys.readouterr().err == f"fxprec: error: {said.format(d=dumped)}\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plan.json", "is not valid JSON at line 15, column 1: .*; the file may be truncated; write it again"),
        ("graph.json", r"is not a graph that fxprec wrote \(.*\); dump the model again"),
    ],
)
def test_a_half_written_file_is_one_line_and_2(name, said, dumped, tmp_path, capsys):
    folder = tmp_path / "graph-0"
    shutil.copytree(dumped / "a/graph-0", folder)
    (folder / name).write_text("".join((folder / name).read_text().splitlines(keepends=True)[:14]))
    assert exit_code("report", tmp_path) == 2
    assert re.fullmatch(f"fxprec: error: {re.escape(str(folder / name))}: {said}\n", capsys.readouterr().err)


def test_inputs_may_be_keywords(dumped, tmp_path):
    asked = ("--recipe", "hfp8", "--low-ratio", 0.5)
    assert exit_code("dump", f"{dumped}/net.py:keywords", "--out", tmp_path / "k", *asked) == 0
    plans = [Plan.load(folder / "graph-0" / "plan.json") for folder in (tmp_path / "k", dumped / "a")]
    assert plans[0].saved_bytes == plans[1].saved_bytes
    assert exit_code("fits", f"{dumped}/net.py:keywords", "--gpu", "1GiB", "--batch", 16) == 0


def test_other_files_in_a_dump_do_not_matter(dumped, tmp_path, capsys):
    shutil.copytree(dumped / "a", tmp_path / "a")
    (tmp_path / "a/graph-0/kernels").mkdir()
    (tmp_path / "a/graph-0/kernels/graph-0-group-1.py").write_text("x = 1\n")
    assert exit_code("diff", tmp_path / "a", dumped / "a") == 0
    assert exit_code("report", tmp_path / "a") == 0
    assert capsys.readouterr().out == f"{tmp_path}/a/graph-0/report.html\n"


def test_a_model_that_fails_is_one_line(dumped, capsys):
    assert exit_code("dump", f"{dumped}/net.py:broken", "--out", dumped / "w") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "cannot be planned under fake tensors" in error


def test_report_is_written_anew(dumped, capsys):
    page: Path = dumped / "b/graph-0/report.html"
    before = page.read_bytes()
    page.unlink()
    assert exit_code("report", dumped / "b") == 0
    assert page.read_bytes() == before
    assert b"<title>fxprec: Sequential (graph-0): hfp8, simulate storage</title>" in before
