"""Two runs side by side: the step and the tensor in which they part first, or why they cannot be compared."""

import pytest
import torch
from torch import nn

import fxprec
from fxprec.cli import main


def train(folder, *, recipe="fp8", change_after=None, width=16, **options) -> None:
    """Train for six steps, the weights of module 2 changed after one of them."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4))
    config = fxprec.Config(recipe=recipe, lowering="eager", dump=folder, on_nonfinite="report", **options)
    call = torch.compile(model, backend=fxprec.Backend(config))
    for step in range(1, 7):
        torch.manual_seed(step)
        call(torch.randn(32, 8)).square().mean().backward()
        if step == change_after:
            model[2].weight.data.mul_(1.5)


def compared(*args: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, args)])
    return int(ended.value.code)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    train(root / "fp8")
    train(root / "bf16", recipe="bf16")
    train(root / "changed", change_after=3)
    return root


def test_the_step_and_the_first_tensor_that_differ(runs, capsys):
    assert compared(runs / "fp8", runs / "changed") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "5 tensors in both, 5 steps"
    assert lines[1] == "they part first at step 4, in forward: addmm_1 (2)"
    assert lines[3].split()[:6] == ["4", "addmm_1", "output", "2", "e4m3fn", "amax"]
    assert [line.split()[1] for line in lines[3:]] == ["addmm_1", "mul_5"]


def test_another_recipe_on_the_same_batches_parts_only_where_every_bit_counts(runs, capsys):
    assert compared(runs / "fp8", runs / "fp8", "--tolerance", "0") == 0
    assert compared(runs / "fp8", runs / "bf16") == 0
    assert capsys.readouterr().out.endswith("they do not part\n")


def test_what_differs_between_models_is_said(runs, tmp_path, capsys):
    train(tmp_path / "wider", width=24)
    assert compared(runs / "fp8", tmp_path / "wider") == 1
    assert "the models differ: graph-0: " in capsys.readouterr().out


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
        ((runs / "fp8", tmp_path), "stranger/graph-0: no graph of one name; give two folders that dump= named"),
        ((runs / "fp8", tmp_path / "plan"), "holds no stats.jsonl, so nothing trained there; train with options="),
        ((runs / "fp8", runs / "bf16", "--tolerance", "-1"), "--tolerance is -1.0; give a relative difference"),
    ):
        assert compared(*args) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
