"""A user's project: the wheel, as it is installed, and the three lines of the README."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.testing.kit_projects import MODEL, THREE_LINES

ROOT = Path(__file__).parents[2]
WHERE = """
def test_fxprec_comes_from_the_wheel():
    import fxprec, fxprec.passes, fxprec.runtime
    for package in (fxprec, fxprec.passes, fxprec.runtime):
        assert {site!r} in package.__path__[0]
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, built from a copy of the source: building leaves files beside it."""
    base = tmp_path_factory.mktemp("wheel")
    for name in ("fxprec", "passes", "runtime"):
        shutil.copytree(ROOT / name, base / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, base / "source")
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=base / "source", check=True, capture_output=True, timeout=120)
    (wheel,) = base.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(base / "site")
    return base / "site"


def test_every_file_that_is_no_module_is_in_the_wheel(site: Path) -> None:
    for name in ("fxprec", "passes", "runtime"):
        target = site / "fxprec" if name != "fxprec" else site
        for file in (ROOT / name).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert (target / file.relative_to(ROOT)).is_file(), file


def test_the_three_lines_write_their_golden_file_and_then_pass(site: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "test_block.py").write_text(THREE_LINES)
    (tmp_path / "test_where.py").write_text(WHERE.format(site=str(site)))

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site), "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    first = run()
    assert first.returncode == 1
    assert "1 failed, 1 passed" in first.stdout
    second = run()
    assert second.returncode == 0, second.stdout
    assert "2 passed" in second.stdout
