"""The command line: fast to start, readable in a pipe, one line for an error."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest
from command_line import exit_code
from typer.testing import CliRunner

from fxprec import cli
from fxprec.errors import FxprecError
from fxprec.numerics.formats import E4M3FN, HFP8_143

runner = CliRunner()


def test_help_does_not_import_torch():
    code = (
        "import sys\n"
        "from fxprec.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    print('exit', end.code)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["exit 0", "False"]
    for command in ("demo", "formats", "version"):
        assert command in done.stdout


def test_version_names_fxprec_and_torch():
    result = runner.invoke(cli.app, ["version"])
    assert result.exit_code == 0
    assert result.output.splitlines()[0] == f"fxprec {metadata.version('fxprec')}"
    assert result.output.splitlines()[1] == f"torch {metadata.version('torch')}"


def test_formats_lists_every_named_format_with_its_limits():
    result = runner.invoke(cli.app, ["formats"])
    assert result.exit_code == 0
    rows = {line.split()[0]: line.split() for line in result.output.splitlines() if line.split()}
    assert rows["e4m3fn"][1:4] == ["E4M3FN", "8", "448"] == ["E4M3FN", str(E4M3FN.bits), f"{E4M3FN.largest:g}"]
    assert rows["1-4-3+4"][1:4] == ["HFP8_143", "8", f"{HFP8_143.largest:g}"]
    assert {"fp32", "fp16", "bf16", "e5m2", "1-5-2", "1-6-9", "1-3-0", "1-2-1"} <= rows.keys()
    assert max(map(len, result.output.splitlines())) <= 120


def test_an_error_is_one_line_on_stderr_and_exit_code_2(monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise FxprecError("the thing: the cause;\n the way out")

    monkeypatch.setattr("fxprec.demo.run.run_demo", fail)
    assert exit_code("demo") == 2
    assert capsys.readouterr() == ("", "fxprec: error: the thing: the cause; the way out\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recipes", "fp32,fp9"], "--recipes: unknown 'fp9'; did you mean 'fp8'?; allowed: fp32, bf16, fp8, hfp8"),
        (["--only", "digit"], "--only: unknown 'digit'; did you mean 'digits'?; allowed: digits, text"),
        (["--threads", "0"], "--threads is 0; give at least 1"),
    ],
)
def test_demo_names_the_wrong_word_and_the_allowed_ones(arguments, said, tmp_path, capsys):
    assert exit_code("demo", "--out", tmp_path, *arguments) == 2
    assert capsys.readouterr().err == f"fxprec: error: {said}\n"
    assert list(tmp_path.iterdir()) == []
