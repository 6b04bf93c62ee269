"""The documentation site: every page is reached, every public name has its docstring there, every link leads somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

import fxprec

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as CI does: a dead link or anchor ends it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([ROOT / "dev", "docs", "--site-dir", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_of_the_repository_is_in_its_navigation(site: Path) -> None:
    menu = (site / "index.html").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/*.md"):
        assert f'href="docs/{page.stem}.html"' in menu, page.name


def test_the_reference_shows_every_public_name_with_its_docstring(site: Path) -> None:
    text = (site / "docs" / "reference.html").read_text(encoding="utf-8")
    shown = set(re.findall(r'id="fxprec\.(?:[\w.]+\.)?(\w+)"', text))
    assert {*fxprec.__all__} - {"__version__"} <= shown
    plain = " ".join(re.sub(r"<[^>]+>", "", text).split())
    first = (fxprec.backend_of.__doc__ or "").strip().splitlines()[0]
    assert re.sub(r"`+", "", first)[:40] in plain


@pytest.mark.core
def test_what_a_page_links_to_in_the_repository_is_there(site: Path) -> None:
    pages = [site / "index.html", *site.glob("docs/*.html")]
    for page in pages:
        for target in re.findall(r'(?:href|src)="(?![a-z]+:|#|/)([^"#?]+)', page.read_text(encoding="utf-8")):
            assert (page.parent / unquote(target)).exists(), f"{page.name}: {target}"
