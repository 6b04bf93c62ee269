"""README as a package index shows it: each link leads to the published source; pyproject.toml gets the addresses."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci/absolute_links.py"
URL = "https://example.org/owner/fxprec"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    for name in ("README.md", "pyproject.toml"):
        (folder / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    return subprocess.run([sys.executable, str(SCRIPT), str(folder), *arguments], capture_output=True, text=True)


def test_links_lead_to_files_of_the_tag_and_pictures_to_raw_ones(tmp_path: Path) -> None:
    assert run(tmp_path, URL + "/", "v0.1.0").returncode == 0
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text)
    elsewhere = re.findall(r"\]\((https://[^)\s]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    targets = [(picture, target) for picture, target in targets if target not in elsewhere]
    assert len(targets) > 30
    for picture, target in targets:
        assert target.startswith(f"{URL}/{'raw' if picture else 'blob'}/v0.1.0/"), target
        assert (ROOT / target.partition("/v0.1.0/")[2].partition("#")[0]).exists(), target


def test_the_package_names_where_to_report(tmp_path: Path) -> None:
    assert run(tmp_path, URL).returncode == 0
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"]["Issues"] == f"{URL}/issues"
    assert {"testing", "test"} <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("url", ["fxprec", "http://example.org/o/n", "https://example.org", "https://e.org/a b"])
def test_what_is_no_address_is_refused(tmp_path: Path, url: str) -> None:
    done = run(tmp_path, url)
    assert done.returncode == 1
    assert "give https://host/owner/name" in done.stderr
