"""README's training script runs as pasted and prints what README says; its tables fit the options there are."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from fxprec import Config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LOSS = re.compile(r"^step +(\d+): loss (\d\.\d+)$", re.MULTILINE)


def block(first_line: str) -> str:
    """Return the one code block that begins with a line."""
    (found,) = re.findall(rf"^```\w*\n({re.escape(first_line)}\n.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.mark.inductor
@pytest.mark.cpu_dependent
def test_the_training_script_prints_what_readme_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("import torch"), encoding="utf-8")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = block("step   0: loss 2.339")
    ours, theirs = (dict(LOSS.findall(text)) for text in (done.stdout, said))
    assert ours.keys() == theirs.keys()
    assert all(float(loss) == pytest.approx(float(theirs[step]), rel=0.02) for step, loss in ours.items())
    if torch.__version__.startswith("2.13."):  # the version that README's figures are of
        assert done.stdout.splitlines()[-1] == said.splitlines()[-1]


def test_the_training_script_has_twenty_lines() -> None:
    assert len([line for line in block("import torch").splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("page", ["README.md", "docs/usage.md"])
def test_every_option_in_the_tables_and_examples_is_one(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    known = {field.name for field in fields(Config)}
    named = set(re.findall(r'"(\w+)":', " ".join(re.findall(r"options=\{[^}]*\}", text))))
    if page == "docs/usage.md":
        cells = re.findall(r"^\| (`\w+`(?: or `\w+`)?) \|", text, re.MULTILINE)
        named |= {name for cell in cells for name in re.findall(r"\w+", cell.replace(" or ", " "))}
        assert len(named) > 15
    assert named <= known
