"""README's training script is short; the tables of options name options there are. The code itself runs: `documents`."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fxprec import Config

ROOT = Path(__file__).parents[1]


def test_the_training_script_has_twenty_lines() -> None:
    (script,) = re.findall(
        r"(?ms)^```python\n(import torch\n.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    assert len([line for line in script.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("page", ["README.md", "docs/usage.md"])
def test_every_option_in_the_tables_is_one(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    known = {field.name for field in fields(Config)}
    named = set(re.findall(r'"(\w+)":', " ".join(re.findall(r"options=\{[^}]*\}", text))))
    if page == "docs/usage.md":
        cells = re.findall(r"^\| (`\w+`(?: or `\w+`)?) \|", text, re.MULTILINE)
        named |= {name for cell in cells for name in re.findall(r"\w+", cell.replace(" or ", " "))}
        assert len(named) > 15
    assert named <= known
