"""The examples run, at a small size; what the page shows of them is there, and each is short."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # examples/ is not installed

from command_line import exit_code

from examples import budget, ddp_aps, edit_plan, fsdp2, kahan
from examples.numerics import test_block as numerics_test
from fxprec.testing import verify
from tests.aps.aps_ranks import run_ranks

SCRIPTS = sorted(path for path in ROOT.glob("examples/**/*.py") if "models" not in path.parts and path.stat().st_size)
PAGE = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
theirs = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_each_is_short_and_on_the_page(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80
    assert f"]({Path('..') / path.relative_to(ROOT)})" in PAGE


@theirs
@pytest.mark.parametrize(("name", "package"), [("huggingface", "transformers"), ("lightning_digits", "lightning")])
def test_a_trainers_example_resumes_bit_for_bit(name: str, package: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    importlib.import_module(f"examples.{name}").main(small=True)
    assert "resumed training has the same parameters: True" in capsys.readouterr().out


def ranks(rank: int, world: int) -> dict[str, str]:
    said = {}
    for name, example in {"ddp": ddp_aps, "fsdp": fsdp2}.items():
        with contextlib.redirect_stdout(io.StringIO()) as text, torch._dynamo.config.patch(optimize_ddp=False):
            example.main(small=True)
        said[name] = text.getvalue()
    return said


def test_ranks_keep_replicas_identical_and_resume_with_states_of_their_own() -> None:
    first, second = run_ranks(2, ranks)
    assert "replicas are bit-identical: True" in first["ddp"]
    assert "the same: True" in first["fsdp"]
    assert "the same: True" in second["fsdp"]


@pytest.mark.filterwarnings("ignore:lr=0.0005 can never move the largest weight")
def test_kahan_sums_lose_fewer_updates(capsys: pytest.CaptureFixture[str]) -> None:
    losses = kahan.main(small=True)
    lost = dict(re.findall(r"(\w+) *: .*; (\d+)% of the updates", capsys.readouterr().out))
    assert losses.keys() == lost.keys() == {"nearest", "kahan"}
    assert int(lost["kahan"]) < int(lost["nearest"])


def test_a_budget_is_kept() -> None:
    ((budget_text, plan),) = budget.main(small=True).items()
    assert plan.saved_bytes.planned <= float(budget_text.removesuffix("MiB")) * 2**20
    assert 0 < len(plan.low_groups) < len(plan.groups)


def test_an_edited_plan_is_in_force() -> None:
    solved, edited = edit_plan.main(small=True)
    assert solved.low_groups != edited.low_groups == frozenset(range(1, len(edited.groups)))


def test_the_numerics_tests_golden_file_holds_and_its_workflow_is_what_the_command_prints(capsys) -> None:
    golden = ROOT / "examples/numerics/test_block/test_block_in_fp8.json"
    same_torch = json.loads(golden.read_text())["torch"] == torch.__version__.partition("+")[0]
    verify(numerics_test.make, options={"recipe": "fp8"}, golden=golden if same_torch else None).raise_if_wrong()
    install = "fxprec[testing] @ git+https://host/owner/fxprec"
    assert exit_code("ci", "--tests", "examples/numerics", "--install", install) == 0
    assert (ROOT / "examples/numerics/numerics.yml").read_text() == capsys.readouterr().out


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the notebook was run on torch 2.13")
@theirs
def test_the_notebook_of_what_objects_show_prints_what_it_says() -> None:
    """Every cell is executed anew. Numbers may differ by processor, words not."""
    notebook = nbformat.read(ROOT / "examples/shown.ipynb", as_version=4)
    saved = shown_by(notebook)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    assert saved == shown_by(notebook)
    assert sum("<table>" in text for text in saved) == 4


def shown_by(notebook: Any) -> list[str]:
    """Return texts and tables of all cells, without numbers and the names of cells."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    outputs = [output for output in outputs if output.get("name") != "stderr"]  # what this processor lacks
    texts = [
        text
        for output in outputs
        for text in (output.get("text"), *(output.get("data", {}).get(kind) for kind in ("text/plain", "text/html")))
        if text
    ]
    return [re.sub(r"\d[\d.,e+-]*(\.py:\d+)?", "#", text) for text in texts]


def test_the_notebook_has_its_outputs_and_pictures_and_its_code_is_python() -> None:
    cells: list[dict[str, Any]] = json.loads((ROOT / "examples/walkthrough.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for cell in code:
        compile("".join(cell["source"]), "walkthrough.ipynb", "exec")
        assert cell["execution_count"]
    kinds = {kind for cell in code for output in cell["outputs"] for kind in output.get("data", {})}
    assert "image/png" in kinds
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
