"""The pytest plugin in a project of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from command_line import exit_code
from torch import nn

from fxprec.testing import page, verify, verify_training
from tests.testing.kit_projects import MODEL, THREE_LINES

pytest_plugins = ["pytester"]


@pytest.fixture(scope="module", autouse=True)
def _torch_is_loaded(tmp_path_factory):
    """A run inside this process forgets the modules it imports, and torch cannot be imported twice."""
    verify(lambda: nn.Linear(2, 2), torch.ones(2, 2), options={"recipe": "fp8", "low_ratio": 1.0})
    assert callable(page.write)
    assert callable(verify_training)


@pytest.fixture
def project(pytester):
    pytester.makepyfile(model=MODEL, test_block=THREE_LINES)
    return pytester


def run(project, *options):
    return project.runpytest_inprocess("-n0", "-p", "no:cacheprovider", *options)


def no_traceback(text):
    return "Traceback" not in text and "fixture.py" not in text and "tensor([" not in text


def test_first_run_writes_and_fails_then_passes_then_shows_a_table_then_updates(project):
    first = run(project)
    golden = project.path / "test_block" / "test_block.json"
    assert first.ret == 1
    assert f"no golden file yet: wrote {golden}; read it, commit it, and run again" in first.stdout.str()
    written = golden.read_bytes()
    assert run(project).ret == 0
    assert golden.read_bytes() == written

    model = project.path / "model.py"
    model.write_text(model.read_text().replace("torch.relu(", "1.02 * torch.relu("))
    changed = run(project, f"--numerics-report={project.path}/out")
    text = changed.stdout.str()
    assert changed.ret == 1
    assert "plan: graph 0: " in text
    line = next(n for n, row in enumerate(MODEL.splitlines()) if "self.down(" in row)
    assert re.search(
        rf"^down\.weight\.grad +down +model\.py:{line} +\d\.\d\de-\d\d +\d\.\d\de-\d\d +\d+\.\d  .* was ", text, re.M
    )
    assert no_traceback(text)

    report = json.loads((project.path / "out" / "numerics.json").read_text())
    (test,) = report["tests"]
    assert (test["test"], test["outcome"]) == ("test_block.py::test_block", "failed")
    (check,) = test["checks"]
    assert {row["tensor"] for row in check["rows"]} >= {"output", "loss", "up.weight.grad", "norm.bias.grad"}
    assert check["message"] in text
    page = (project.path / "out" / "index.html").read_text()
    assert '<details class="bad" open><summary>test_block.py::test_block' in page
    assert "<code>pytest --numerics-update</code>" in page

    assert run(project, "--numerics-update").ret == 0
    assert golden.read_bytes() != written
    assert run(project).ret == 0


TRAINING = """
import torch
import torch.nn.functional as F
from torch import nn

class Lazy(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=RATE)

def batch(step):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return x, x[:, :3].argmax(1)

def test_curve(numerics):
    options = {"recipe": "fp8", "low_ratio": 0.5}
    numerics.check_training(lambda: nn.Linear(8, 3), batch, loss=F.cross_entropy, steps=6, seeds=2,
                            options=options, optimizer=Lazy)

def test_no_loss(numerics):
    numerics.check_training(lambda: nn.Linear(8, 3), batch, steps=0)
"""


def test_a_training_run_is_held_to_its_band(pytester):
    def trained(rate, *options):
        pytester.makepyfile(test_curve=TRAINING.replace("RATE", str(rate)))
        return run(pytester, *options)

    text = trained(1.0).stdout.str()
    golden = pytester.path / "test_curve" / "test_curve.json"
    assert f"no golden file yet: wrote {golden}; read it, commit it, and run again" in text
    assert "fxprec: error: steps is 0 and seeds 5; give at least 1 step and 2 seeds" in text
    trained(1.0).assert_outcomes(passed=1, failed=1)
    slow = trained(0.01, f"--numerics-report={pytester.path}/out")
    slow.assert_outcomes(failed=2)
    assert re.search(r"^loss outside the band at \d of 6 steps$", slow.stdout.str(), re.M)
    assert no_traceback(slow.stdout.str())
    (curve, _) = json.loads((pytester.path / "out" / "numerics.json").read_text())["tests"]
    (check,) = curve["checks"]
    assert (check["kind"], check["status"], len(check["losses"])) == ("training", "failed", 6)
    assert all(low < high for low, high in zip(check["low"], check["high"], strict=True))
    written = golden.read_bytes()
    trained(0.01, "--numerics-update").assert_outcomes(passed=1, failed=1)
    assert golden.read_bytes() != written


BAD_GOLDENS = {
    "[1, 2": "is not JSON",
    "[1, 2]": "is a list, not a golden file of the numerics kit",
    '{"schema": 99}': "has schema 99, and this fxprec reads 1",
    '{"schema": 1, "options": {}, "plans": [{"sites": 3}], "statistics": [], "torch": "2"}': "top level: has no 'schema'",
    '{"schema": 1, "options": {}, "plans": [], "statistics": [{"name": "a", "numbers": {"b": [1, -1]}}], "torch": "2"}': "statistics[0].numbers.b is [1, -1], and must be [value, tolerance]",
    '{"schema": 1, "options": {}, "plans": [], "statistics": [], "torch": NaN}': "torch is missing or not a str",
    '{"schema": 1, "options": [], "plans": []}': "options is missing or not a dict",
}


def test_bad_use_is_one_line_each_and_exit_code_2(pytester):
    """Golden files edited into nonsense, a model without float64, one with dropout, an unknown option."""
    goldens = pytester.mkdir("test_bad")
    for i, text in enumerate(BAD_GOLDENS):
        (goldens / f"golden{i}.json").write_text(text)
    pytester.makepyfile(
        model=MODEL,
        test_bad=f"""
        import pytest, torch
        from torch import nn
        from model import Block, inputs

        @pytest.mark.parametrize("i", range({len(BAD_GOLDENS)}))
        def test_golden(numerics, i):
            numerics.check(Block, inputs, options={{"recipe": "fp8"}}, name=f"golden{{i}}")

        class Single(Block):
            def forward(self, x):
                return super().forward(x.float())

        def test_float64(numerics):
            numerics.check(Single, inputs)

        def test_dropout(numerics):
            numerics.check(lambda: nn.Sequential(Block(), nn.Dropout(0.5)), inputs)

        def test_option(numerics):
            numerics.check(Block, inputs, options={{"recipi": "fp8"}})

        def test_factory(numerics):
            numerics.check(lambda: 3, inputs)

        def test_shared_name(numerics):
            numerics.check(Block, inputs, name="golden0")
        """,
    )
    result = run(pytester)
    text = result.stdout.str()
    assert result.ret == 2
    assert no_traceback(text)
    said = [line for line in result.outlines if line.startswith("fxprec: error: ")]
    words = [
        *BAD_GOLDENS.values(),
        "Single cannot run in float64: RuntimeError: mat1 and mat2 must have the same dtype",
        "Sequential draws random numbers in forward (dropout?)",
        "unknown option 'recipi'; did you mean 'recipe'?",
        "the factory returned int; let it return a torch.nn.Module",
        "golden0.json is the golden file of test_bad.py::test_golden[0] too; give one of them another name=",
    ]
    assert len(said) == len(words)
    for line, wanted in zip(said, words, strict=True):
        assert wanted in line
    assert all("rewrite it with --numerics-update" in line for line in said[: len(BAD_GOLDENS)])


def test_pytest_starts_without_torch(pytester):
    pytester.makepyfile("import sys\ndef test_modules():\n    assert 'torch' not in sys.modules\n")
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=pytester.path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    shown = subprocess.run([*command[:-3], "--help"], cwd=pytester.path, capture_output=True, text=True, check=True)
    assert "--numerics-report=DIR" in shown.stdout


def test_under_xdist_every_check_reaches_the_report(pytester):
    """Its records travel from a worker; a broken golden file is exit code 2 there too."""
    pytester.mkdir("test_two").joinpath("broken.json").write_text("{")
    pytester.makepyfile(
        model=MODEL,
        test_two="""
        from model import Block, inputs

        def test_same(numerics):
            numerics.check_identical(inputs, inputs)

        def test_broken(numerics):
            numerics.check(Block, inputs, name="broken")
        """,
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n1", "--numerics-report=out"]
    done = subprocess.run(command, cwd=pytester.path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout
    report = json.loads((pytester.path / "out" / "numerics.json").read_text())
    found = {test["test"]: test["checks"][0]["status"] for test in report["tests"]}
    assert found == {"test_two.py::test_same": "passed", "test_two.py::test_broken": "error"}


def test_ci_prints_a_workflow_and_refuses_what_is_no_path(capsys):
    for arguments, code, words in (
        (
            ["ci", "--tests", "tests/numerics", "--install", "fxprec[testing]"],
            0,
            "run: pytest tests/numerics --numerics-report=numerics-report",
        ),
        (["ci", "--tests", "$(rm)"], 2, "fxprec: error: --tests is '$(rm)'; give letters, digits"),
    ):
        assert exit_code(*arguments) == code
        said = capsys.readouterr()
        assert words in (said.err if code else said.out)
        assert "{{" not in said.out
