"""Two runs side by side: the step and the tensor in which they first differ, or why they cannot be compared."""

import json
import re
from dataclasses import replace

import pytest
import torch
from command_line import exit_code
from torch import nn

import fxprec
from fxprec.report.compare_page import page


def train(folder, *, recipe="fp8", change_after=None, width=16, factor=1.5, **options):
    """Train for six steps, the weights of module 2 changed after one of them; return what was compiled."""
    torch.compiler.reset()
    torch.manual_seed(0)
    hidden = (nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
    model = nn.Sequential(*hidden, nn.Linear(width, 4))
    config = fxprec.Config(recipe=recipe, lowering="eager", dump=folder, **{"on_nonfinite": "report", **options})
    call = torch.compile(model, backend=fxprec.Backend(config))
    for step in range(1, 7):
        torch.manual_seed(step)
        call(torch.randn(32, 8)).square().mean().backward()
        if step == change_after:
            model[2].weight.data.mul_(factor)
    return call


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    train(root / "fp8")
    train(root / "bf16", recipe="bf16")
    train(root / "changed", change_after=3)
    return root


def test_the_step_and_the_first_tensor_that_differ(runs, capsys):
    assert exit_code("compare", runs / "fp8", runs / "changed") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 tensors in both, 5 steps"
    assert lines[1] == "they first differ at step 4, in forward: addmm_1 (2)"
    assert lines[3].split()[:6] == ["4", "addmm_1", "output", "2", "e4m3fn", "amax"]
    assert [line.split()[1] for line in lines[3:]] == ["addmm_1", "addmm_2"]


def test_another_recipe_on_the_same_batches_parts_only_where_every_bit_counts(runs, capsys):
    assert exit_code("compare", runs / "fp8", runs / "fp8", "--tolerance", "0") == 0
    assert exit_code("compare", runs / "fp8", runs / "bf16") == 0
    assert capsys.readouterr().out.endswith("they do not differ\n")


def test_what_differs_between_models_is_said(runs, tmp_path, capsys):
    train(tmp_path / "wider", width=24)
    assert exit_code("compare", runs / "fp8", tmp_path / "wider") == 1
    assert "the models differ: graph-0: " in capsys.readouterr().out


HASHES = {"dump_tensors": ("*",), "dump_every": 1, "dump_limit": 0}


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """Runs with all tensors' values: alike, one with weights changed by one bit in 2^20, and one of bf16."""
    root = tmp_path_factory.mktemp("dumped")
    train(root / "one", **HASHES)
    train(root / "again", **HASHES)
    train(root / "nudged", change_after=3, factor=1 + 2**-20, **HASHES)
    train(root / "values", **HASHES | {"dump_limit": None})
    train(root / "bf16", recipe="bf16", **HASHES | {"dump_limit": None})
    return root


def test_bit_for_bit_the_update_is_named_where_forward_only_follows(dumped, capsys):
    assert exit_code("compare", dumped / "one", dumped / "again", "--bitwise") == 0
    assert capsys.readouterr().out.endswith("they do not differ: every hash is equal\n")
    assert exit_code("compare", dumped / "one", dumped / "nudged", "--bitwise") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("they first differ at step 4, in the weights after the previous update: 2.weight (2")
    assert lines[2].startswith("  then at step 4, in forward: addmm_1 (2")
    assert lines[3].startswith("  then at step 4, in backward: ")
    assert exit_code("compare", dumped / "one", dumped / "nudged") == 0  # by a tolerance of 0.1 nothing happened


def test_values_that_were_kept_give_distances(dumped, tmp_path):
    found = fxprec.compare(dumped / "values", dumped / "bf16", tolerance=1e-3)
    assert found.partings
    assert {pair.half for pair in found.partings} == {"backward"}  # real storage: forward reads no rounded value
    first = found.partings[0]
    assert first.parting.what == "values"
    assert 1e-3 < first.parting.difference < 0.1
    assert "recipe: fp8 and bf16" in found.differences
    data = json.loads((found.save(tmp_path).parent / "compare.json").read_text())
    assert data["tensors"][0]["parting"]["difference"] == first.parting.difference
    assert len(data["tensors"]) == len(found.pairs)


def test_live_backends_are_compared_as_their_folders_are(runs):
    ours, theirs = train(None), train(None, change_after=3)
    live, stored = fxprec.compare(ours, fxprec.backend_of(theirs)), fxprec.compare(runs / "fp8", runs / "changed")
    assert [(p.ours.tensor, p.parting.step) for p in live.partings] == [
        (p.ours.tensor, p.parting.step) for p in stored.partings
    ]
    assert (live.first, live.second) == ("the first backend", "the second backend")


def test_the_page_holds_names_as_text_and_the_same_bytes(runs):
    found = fxprec.compare(runs / "fp8", runs / "changed")
    found = replace(found, first="<script>alert(1)</script>", differences=("</script><b>",))
    text = page(found)
    assert text == page(found)
    assert "<script>alert" not in text
    assert "</script><b>" not in text
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert [half["half"] for half in data["halves"]] == ["update", "forward", "backward"]
    assert data["tensors"][0]["parting"]["step"] == 4


def test_what_cannot_be_compared_is_one_line_that_teaches(runs, tmp_path, capsys):
    stranger = tmp_path / "stranger"
    torch.compiler.reset()
    model = nn.Sequential(nn.Identity(), nn.Linear(8, 4))
    call = torch.compile(model, backend=fxprec.Backend(fxprec.Config(recipe="fp8", lowering="eager", dump=stranger)))
    for _ in range(3):
        call(torch.randn(32, 8)).sum().backward()
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "plan.json").write_bytes((runs / "fp8" / "graph-0" / "plan.json").read_bytes())
    for args, words in (
        ((runs / "fp8", tmp_path / "none"), "none: "),
        (
            (runs / "fp8", tmp_path),
            "stranger/graph-0: they have no graph name in common; give two folders that dump= named",
        ),
        ((runs / "fp8", tmp_path / "plan"), "holds no stats.jsonl, so nothing trained there; train with options="),
        (
            (runs / "fp8", runs / "bf16", "--bitwise"),
            "holds no hashes, which a bitwise comparison needs; train both with",
        ),
        (
            (runs / "fp8", runs / "bf16", "--out", "/dev/null/x"),
            "cannot be written: Not a directory; choose a writable",
        ),
        ((runs / "fp8", runs / "bf16", "--tolerance", "-1"), "tolerance is -1.0; give a relative difference"),
    ):
        assert exit_code("compare", *args) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_live_runs_that_know_nothing_are_told():
    untrained = torch.compile(nn.Linear(2, 2), backend="fxprec", options={"recipe": "fp8"})
    for given, words in (
        (3, "the second run is int; give compare a dump folder, a Backend or a model that fxprec compiled"),
        (untrained, "the second backend has compiled no training graph yet; run a step first"),
        (train(None, on_nonfinite="ignore"), "keeps no statistics under on_nonfinite='ignore'; use 'report'"),
    ):
        with pytest.raises(fxprec.ConfigError, match=re.escape(words)):
            fxprec.compare(train(None), given)
    with pytest.raises(fxprec.ConfigError, match="tolerance is nan; give a relative difference"):
        fxprec.compare(".", ".", tolerance=float("nan"))
