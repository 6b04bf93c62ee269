"""Culprit search, and failures reduced to scripts that run alone."""

from __future__ import annotations

import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import exit_code
from torch import nn

from fxprec import Config, LoweringError
from fxprec.minify.culprits import find_culprits
from fxprec.testing.case import Case

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.a(x)))
        return self.b((x * 3000.0) * (1 / 3000.0) + x)

class Wide(Net):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16, dtype=torch.float64))

    def forward(self, x):
        return self.b((torch.relu(self.a(x)).square() * self.gain).float())

def make():
    return Net(), torch.randn(32, 8)

def wide():
    return Wide(), torch.randn(32, 8)
"""


class Deep(nn.Module):
    """200 tensors in 50 additions; the output of one product overflows an 8-bit format."""

    def __init__(self, sensitive: int = 31, layers: int = 50) -> None:
        super().__init__()
        self.biases = nn.ParameterList(torch.randn(8) / 8 for _ in range(layers))
        self.sensitive = sensitive

    def forward(self, x):
        for i, bias in enumerate(self.biases):
            x = x + bias
            if i == self.sensitive:
                x = (x * 3000.0) * (1 / 3000.0)
        return x


def test_one_sensitive_tensor_among_150_is_named_first():
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    search = find_culprits(Case.make(Deep, x), Config(recipe="hfp8", low_ratio=1.0))
    assert search.sites >= 150
    assert (search.culprits[0].site.tensor, search.culprits[0].site.kind) == ("mul", "output")
    assert search.culprits[0].error > 10 * max([c.error for c in search.culprits[1:]], default=search.high)
    assert search.runs < 40
    assert "mul " in search.text().splitlines()[2]
    head, *_ = replace(search, tensor="a\nb.grad").text().splitlines()
    assert head.startswith(r"a\nb.grad: error ")


@pytest.fixture
def net(tmp_path, monkeypatch):
    (tmp_path / "n'e\"t.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return "n'e\"t.py"


def exit_code_of(script: str) -> object:
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    return end.value.code


def test_an_error_is_explained_and_reduced_to_a_script_that_runs_alone(net, capsys):
    assert exit_code("minify", f"{net}:make", "--recipe", "hfp8", "--low-ratio", 1, "--error-above", 0.5) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[2].split()[:2] == ["mul_2", "output"]
    assert said[-2].startswith("7 operators reduced to 1: relative error of ")
    command = [sys.executable, "-W", "ignore", "repro.py"]
    script = subprocess.run(command, capture_output=True, text=True, check=False)
    assert script.returncode == 1
    assert script.stdout.startswith("relative error of ")
    Path("mended.py").write_text(Path("repro.py").read_text().replace("3000.0", "1.0"))
    assert not exit_code_of("mended.py"), "without the product the error is gone"


def test_a_crash_is_reduced(net, capsys):
    assert exit_code("minify", f"{net}:wide", "--crash", "--out", "small.py") == 0
    assert "6 operators reduced to 1: raises LoweringError: l_self_modules_gain_ is float64" in capsys.readouterr().out
    with pytest.raises(LoweringError, match=r"^l_self_modules_gain_ \(small\.py:\d+\) is float64"):
        runpy.run_path("small.py", run_name="__main__")


def test_a_model_that_does_not_run_by_itself_is_one_line(tmp_path, capsys):
    (tmp_path / "broken.py").write_text(
        "import torch\nclass Broken(torch.nn.Linear):\n    def forward(self, x):\n        raise ValueError('no')\n"
        "def make():\n    return Broken(2, 2), torch.ones(2)\ndef factory():\n    return Broken()\n"
    )
    for name, words in (
        ("make", "Broken does not run on its inputs, uncompiled either: ValueError: no (broken.py:4); give the inputs"),
        ("factory", "missing 2 required positional arguments: 'in_features' and 'out_features' (broken.py:8); call"),
    ):
        assert exit_code("minify", f"{tmp_path}/broken.py:{name}") == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1


def test_wrong_use_is_one_line(net, capsys):
    for arguments, words in (
        (("--crash", "--error-above", 1), "--crash and --error-above are both given; choose the failure to reduce"),
        (("--error-above", 10, "--recipe", "bf16"), "does not fail: relative error of"),
        (
            ("--tensor", "nobody"),
            "'nobody' is not one of the tensors compared; give one of output, loss, a.weight.grad",
        ),
        (("--recipe", "fp32"), "holds everything in float32"),
        (("--recipe", "fp8+int4"), "recipe 'fp8+int4' saves copies in int4, and the search runs in storage='simulate'"),
    ):
        assert exit_code("minify", f"{net}:make", *arguments) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
