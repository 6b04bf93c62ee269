"""``fxprec doctor``: text, page and JSON of a model file; saved states of a run; what is wrong with a file."""

import pytest
import torch
from torch import nn

from fxprec.cli import main

MODEL = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
    return model, torch.randn(32, 8), lambda y: y.square().mean()

def nothing():
    return nn.Linear(8, 4)
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    (tmp_path / "patient.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "patient.py:make"


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *args])
    return int(ended.value.code or 0)


def test_text_page_and_json(target, tmp_path, capsys):
    assert run(target, "--formats", "e4m3fn", "--out", "found") == 0
    out = capsys.readouterr().out
    for words in (
        "s] step compiled and run",
        "Worst tensors as planned",
        "Prediction checked",
        "options={'recipe': 'fp8'}",
    ):
        assert words in out
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == ["diagnosis.html", "diagnosis.json"]


def test_saved_states_say_which_module_became_fragile_when(target, tmp_path, capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
    for step in (1, 2, 10):
        if step == 10:
            model[0].weight.data.mul_(2000)
        torch.save({"model": model.state_dict(), "step": step}, tmp_path / f"step-{step}.pt")
    assert run(target, "--checkpoint", "step-*.pt") == 0
    table = capsys.readouterr().out.partition("Damage by module")[2].splitlines()
    assert table[1].split()[:4] == ["module", "step-1", "step-2", "step-10"]
    assert table[2].split()[-1] == "step-10"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["patient.py:nothing"], "returned Linear; let it return (model, batch) or (model, batch, loss)"),
        (["patient.py:mak"], "has no callable 'mak'; did you mean 'make'"),
        (["patient.py:make", "--recipe", "fp9"], "unknown recipe 'fp9'"),
        (["patient.py:make", "--checkpoint", "none-*.pt"], "matches no file; give a pattern such as 'run/step-*.pt'"),
        (["patient.py:make", "--checkpoint", "patient.py"], "cannot be read as a checkpoint"),
        (["patient.py:make", "--checkpoint", "other.pt"], "is no state of Sequential: Missing key(s)"),
    ],
)
def test_bad_input_is_one_line_that_teaches(target, args, words, tmp_path, capsys):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pt")
    assert run(*args) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
