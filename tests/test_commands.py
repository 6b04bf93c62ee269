"""What all commands share: versions, JSON, a user's mistakes in one line, what a report of an error needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import exit_code
from typer.testing import CliRunner

import fxprec
from fxprec import Plan, cli
from fxprec.commands.env import environment, where_to_report
from fxprec.gpu_check.findings import Findings

TARGETS = """import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(3, 4)

def chatty(*_):
    print("loading")
    return make()

def wrong_shapes():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(9, 2)), torch.ones(3, 4)

class Views(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(7)

def wrong_view():
    return Views(4, 4), torch.ones(3, 4)

def raises():
    return {}["no"]

def needs(x):
    return x

def score(backend, seed):
    print("training")
    return 0.5

def fails(backend, seed):
    return int("no")

def ours(backend, seed):
    from fxprec import Plan
    return Plan(gemms=(1,))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "t.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(*arguments: str) -> Any:
    """Return the JSON that a command prints; nothing but JSON may be on standard output."""
    result = CliRunner().invoke(cli.app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_version_in_all_places_is_the_packages() -> None:
    said = subprocess.run([sys.executable, "-m", "fxprec", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"fxprec {metadata.version('fxprec')}\n"
    assert fxprec.__version__ == metadata.version("fxprec")
    assert "__version__" in dir(fxprec)


def test_completion_can_be_installed() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "fxprec", "--show-completion", "bash"],
        capture_output=True,
        text=True,
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    )
    assert shown.returncode == 0, shown.stderr
    assert "_FXPREC_COMPLETE=complete_bash" in shown.stdout


def test_every_command_that_prints_a_table_prints_json_too() -> None:
    tables = {
        "demo",
        "formats",
        "predict",
        "fits",
        "measure",
        "doctor",
        "choose",
        "compare",
        "minify",
        "gpu-check",
        "env",
        "diff",
        "explain",
    }
    for name in tables:
        assert "--json" in CliRunner().invoke(cli.app, [name, "--help"]).output, name


def test_formats_as_json_are_those_of_the_table() -> None:
    found = printed("formats")
    (e4m3,) = [row for row in found["formats"] if row["name"] == "e4m3fn"]
    assert (e4m3["bits"], e4m3["largest"], e4m3["torch_dtype"]) == (8, 448.0, "float8_e4m3fn")
    table = CliRunner().invoke(cli.app, ["formats"]).output
    assert all(row["constant"] in table for row in [*found["formats"], *found["block_formats"]])


def test_the_papers_tables_as_json() -> None:
    first, *others = printed("predict", "--paper")["speedups"]
    assert (first["gpus"], first["32-bit"]["published"], first["8-bit"]["published"]) == (4, 3.53, 3.67)
    assert round(first["8-bit"]["predicted"], 2) == 3.67
    assert len(others) == 12


def test_choose_prints_json_and_its_progress_elsewhere(here: Path) -> None:
    found = printed("choose", "t.py:score", "--ratios", "0", "--seeds", "1")
    assert (found["low_ratio"], found["reference"]["scores"]) == (0, [0.5])


def test_doctor_prints_json_and_its_progress_elsewhere(here: Path) -> None:
    found = printed("doctor", "t.py:chatty", "--formats", "e4m3fn")
    assert found["recommended"]["recipe"] == "fp8"
    assert json.loads((here / "fxprec-doctor/diagnosis.json").read_text()) == found


def test_fits_prints_json(here: Path) -> None:
    assert printed("fits", "t.py:chatty", "--gpu", "1GiB")["fits"]


def test_minify_prints_json(here: Path) -> None:
    found = printed("minify", "t.py:chatty", "--recipe", "hfp8")
    assert found["error"] >= found["error_with_all_high"]
    assert [c["adds"] for c in found["culprits"]] == sorted((c["adds"] for c in found["culprits"]), reverse=True)


@pytest.mark.parametrize(
    ("command", "printed_first", "place"),
    [
        ("choose t.py:score --ratios 0 --seeds 1 --out no/x", "<- chosen", "no/x"),
        ("doctor t.py:make --formats e4m3fn --out t.py", "Recommended", "t.py"),
        ("fits t.py:make --gpu 1GiB --out t.py", "it fits", "--out t.py"),
        ("export t.py:make --recipe fp8 --out no/x", "", "no/x"),
        ("gpu-check --out t.py", "all passed", "--out t.py"),
    ],
)
def test_a_result_that_cannot_be_written_is_printed(
    command: str,
    printed_first: str,
    place: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [Findings("machine", "gpu", passed=["sums of ones"])]
    monkeypatch.setattr("fxprec.gpu_check.run.run_items", lambda *arguments, **options: found)
    assert exit_code(*command.split()) == 2
    said = capsys.readouterr()
    assert printed_first in said.out
    assert re.search(
        rf"^fxprec: error: {place}: cannot be written: [^;]*; choose a writable (folder|path)$", said.err, re.M
    )


def test_a_dump_that_offloads_says_that_a_cpu_refuses_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("dump", "t.py:make", "--peak-budget", "100%", "--ways")
    said = "training on a CPU, where saved tensors are in host memory, refuses 'offload'"
    for ways, is_said in (("recompute", False), ("recompute,offload", not torch.cuda.is_available())):
        assert exit_code(*asked, ways) == 0
        assert (said in capsys.readouterr().out) == is_said


def test_ways_may_be_written_with_blanks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("dump", "t.py:make", "--peak-budget", "100%", "--ways", "narrow, recompute") == 0
    for command in (["dump", "t.py:make", "--peak-budget", "100%"], ["fits", "t.py:make", "--gpu", "1GiB"]):
        assert exit_code(*command, "--ways", "narrow, x") == 2
        assert "unknown ways 'x'; allowed: 'narrow', 'int4'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("doctor t.py:raises", "target 't.py:raises': KeyError: 'no' (t.py:23); call it in a script of yours to see"),
        ("doctor t.py:needs", "t.py:25: TypeError: needs() missing 1 required positional argument: 'x'"),
        ("doctor t.py:wrong_shapes", "uncompiled either: RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x8 and 9x2); give"),
        ("choose t.py:needs --seeds 1", "t.py:25: TypeError: needs() takes 1 positional argument but 2 were given"),
        ("choose t.py:fails --seeds 1", "ValueError: invalid literal for int() with base 10: 'no' (t.py:33); call"),
        ("choose t.py:score --ratios 0 --seeds 1 --out no/x", "no/x: cannot be written: No such file or directory"),
        ("dump t.py:wrong_shapes", "fake tensors: RuntimeError: a and b must have same reduction dim, but got [3, 8] X"),
        ("measure t.py:make --sides fp9", "unknown recipe 'fp9'; did you mean 'fp8'"),
        ("measure t.py:none", "t.py has no callable 'none'"),
        ("measure t.py:make --peak-budget much", "peak_budget"),
        ("measure t.py:make --sides autocast --peak-budget 60%", "and --sides names none; add one, such as fp8"),
        ("dump t.py:wrong_view", "RuntimeError: shape '[7]' is invalid for input of size 12 (t.py:17); make it run as"),
    ],
)  # fmt: skip
def test_a_users_mistake_is_one_line_with_its_cause(
    command: str, said: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*command.split()) == 2
    error = capfd.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["dump", "doctor"])
def test_torch_logs_no_page_beside_the_line(command: str, here: Path) -> None:
    """In a process of its own: torch's handler holds the stream that was there when torch was imported."""
    words = [sys.executable, "-m", "fxprec", command, "t.py:wrong_shapes"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr


def test_an_error_of_fxprec_itself_keeps_its_traceback(here: Path) -> None:
    with pytest.raises(AttributeError) as raised:
        cli.main(["choose", "t.py:ours", "--seeds", "1"])
    assert raised.traceback[-1].path.name != "t.py"


def test_dump_holds_modules_high(here: Path) -> None:
    low = {}
    for name, options in (("all", []), ("kept", ["--keep-high", "0"]), ("ends", ["--keep-high", "ends"])):
        assert exit_code("dump", "t.py:make", "--out", name, *options) == 0
        low[name] = Plan.load(here / name / "graph-0/plan.json").achieved_low_ratio
    assert low["all"] > low["kept"] > low["ends"]


def test_explain_says_why_a_plan_has_no_lowering_and_no_budget(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("dump", "t.py:make") == 0
    for word, said in (("lowering", "made without compiling"), ("peak_budget", "none was asked for")):
        capsys.readouterr()
        assert exit_code("explain", "fxprec-dump", word) == 0
        assert said in capsys.readouterr().out


def test_env_names_what_numbers_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    found = environment()
    assert found["torch"] == metadata.version("torch")
    assert found["environment"]["TORCHINDUCTOR_MAX_AUTOTUNE"] == "1"
    assert "hidden" not in str(found)
    said = CliRunner().invoke(cli.app, ["env"]).output
    assert all(name in said for name in ("fxprec", "triton", "python", "processor", "compiler", "gpu", "report to"))


def test_where_to_report_is_the_address_that_the_package_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named:
        def get_all(self, name: str) -> list[str]:
            return ["Source, https://example.org/s", "Issues, https://example.org/i"]

    monkeypatch.setattr(metadata, "metadata", lambda name: Named())
    assert where_to_report() == "https://example.org/i"


def test_without_a_compiler_one_line_names_the_way_out(tmp_path: Path) -> None:
    script = (
        "import torch, fxprec\n"
        "compiled = torch.compile(torch.nn.Linear(4, 4), backend='fxprec', options={'recipe': 'fp8'})\n"
        "try:\n    compiled(torch.ones(2, 4))\n"
        "except fxprec.LoweringError as error:\n    print(error)"
    )
    place = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PATH": str(tmp_path), "CXX": "no-such-compiler"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=place, check=True)
    assert done.stdout.startswith("no C++ compiler found, which Inductor needs on a CPU; install one")
    assert "options={'lowering': 'eager'}" in done.stdout
    assert done.stdout.count("\n") == 1


def origin(monkeypatch: pytest.MonkeyPatch, **entry: Any) -> None:
    """Let fxprec be installed from somewhere (PEP 610); nothing: from an index."""

    class Installed:
        version = "1.2.3"

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return json.dumps(entry) if entry else None

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())


def test_ci_installs_from_where_fxprec_was_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    origin(monkeypatch)
    assert exit_code("ci") == 0
    assert 'run: pip install -e . "fxprec[testing]==1.2.3"\n' in capsys.readouterr().out
    origin(monkeypatch, url="https://host/o/fxprec", vcs_info={"vcs": "git", "commit_id": "abc"})
    assert exit_code("ci") == 0
    assert '"fxprec[testing] @ git+https://host/o/fxprec@abc"\n' in capsys.readouterr().out
    origin(monkeypatch, url="file:///home/me/fxprec", dir_info={"editable": True})
    assert exit_code("ci") == 2
    assert "a folder of this machine; name what pip can install it from elsewhere, --install" in capsys.readouterr().err
    assert exit_code("ci", "--install", "fxprec[testing]>=1") == 0
    assert 'run: pip install -e . "fxprec[testing]>=1"\n' in capsys.readouterr().out
    assert exit_code("ci", "--install", 'x"; rm -r /') == 2
