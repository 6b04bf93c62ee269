"""Files named on the command line: ``path/file.py:factory``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fxprec.report.target import find_factory


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths that a test leaves behind are forgotten."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_two_files_of_one_name_are_two_modules_and_another_module_of_that_name_stays(tmp_path: Path) -> None:
    before = sys.modules.get("model")
    text = "from dataclasses import dataclass\n@dataclass\nclass make:\n    n: int = {}\n"
    made = []
    for n in range(2):
        (tmp_path / str(n)).mkdir()
        path = tmp_path / str(n) / "model.py"
        path.write_text(text.format(n))
        made.append(find_factory(f"{path}:make"))
    assert [make().n for make in made] == [0, 1]
    assert sys.modules.get("model") is before


def test_a_file_imports_its_neighbours_as_a_script_does(tmp_path: Path) -> None:
    (tmp_path / "fxprec_neighbour.py").write_text("WIDTH = 7\n")
    path = tmp_path / "model.py"
    path.write_text("import fxprec_neighbour\ndef make():\n    return fxprec_neighbour.WIDTH\n")
    assert find_factory(f"{path}:make")() == 7
