"""``fxprec doctor``: text, page and JSON of a model file; saved states of a run; what is wrong with a file."""

import pytest
import torch
from command_line import exit_code
from torch import nn

from fxprec.errors import ConfigError

MODEL = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4))
    return model, torch.randn(32, 8), lambda y: y.square().mean()

def nothing():
    return nn.Linear(8, 4)

class Refuses(nn.Linear):
    def forward(self, x):
        raise ValueError("the width must be 64")  # in forward

def refuses():
    return Refuses(8, 4), torch.randn(2, 8)

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("gradient")  # in backward

class Fails(nn.Linear):
    def forward(self, x):
        return Backward.apply(super().forward(x))

def fails():
    return Fails(8, 4), torch.randn(2, 8)

def loses():
    return nn.Linear(8, 4), torch.randn(2, 8), lambda y: y.view(3).sum()  # in the loss
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    (tmp_path / "patient.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "patient.py:make"


def test_text_page_and_json(target, tmp_path, capsys):
    assert exit_code("doctor", target, "--formats", "e4m3fn", "--out", "found") == 0
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
    assert exit_code("doctor", target, "--checkpoint", "step-*.pt") == 0
    table = capsys.readouterr().out.partition("Damage by module")[2].splitlines()
    assert table[1].split()[:4] == ["module", "step-1", "step-2", "step-10"]
    assert table[2].split()[-1] == "step-10"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["patient.py:nothing"], "returned Linear; let it return (model, batch) or (model, batch, loss)"),
        (["patient.py:mak"], "has no callable 'mak'; did you mean 'make'"),
        (["patient.py:make", "--recipe", "fp9"], "unknown recipe 'fp9'"),
        (
            ["patient.py:make", "--checkpoint", "step-*.pt", "--formats", "bf16"],
            "--formats has no effect with --checkpoint",
        ),
        (["patient.py:make", "--checkpoint", "none-*.pt"], "matches no file; give a pattern such as 'run/step-*.pt'"),
        (["patient.py:make", "--checkpoint", "patient.py"], "cannot be read as a checkpoint"),
        (["patient.py:make", "--checkpoint", "other.pt"], "is not a state of Sequential: Missing key(s)"),
    ],
)
def test_bad_input_is_one_line_that_teaches(target, args, words, tmp_path, capsys):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "other.pt")
    assert exit_code("doctor", *args) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("factory", "whose", "said", "line"),
    [
        (
            "refuses",
            "Refuses does not run on its batch, uncompiled either",
            "ValueError: the width must be 64",
            "forward",
        ),
        ("fails", "the backward pass of Fails fails, uncompiled too", "KeyError: 'gradient'", "backward"),
        ("loses", "the loss fails on what Linear returns", "RuntimeError: shape '[3]' is invalid", "the loss"),
    ],
)
def test_an_error_of_the_users_own_is_shown_as_such_with_its_line(target, capsys, factory, whose, said, line):
    at = 1 + next(i for i, text in enumerate(MODEL.splitlines()) if text.endswith(f"# in {line}"))
    assert exit_code("doctor", f"patient.py:{factory}") == 2
    (told,) = (text for text in capsys.readouterr().err.splitlines() if text.startswith("fxprec: error: "))
    assert told.startswith(f"fxprec: error: {whose}: {said}")
    assert f" (patient.py:{at}); " in told


def test_what_fails_compiled_alone_is_told_as_the_compilers():
    from fxprec.diagnosis.subject import Subject

    def call(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no code for it")

    subject = Subject.of(nn.Linear(8, 4), torch.randn(2, 8))
    with pytest.raises(
        ConfigError, match=r"Linear runs on its batch uncompiled and fails compiled: RuntimeError: no code"
    ):
        subject.step(call)
