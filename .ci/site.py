"""MkDocs hook: the site has the pages where the repository has them, and each file that a page links to.

README and CONTRIBUTING link into ``docs/`` and pages there link to sources, so links hold in the repository and on the
site without being written twice.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)")
TEXT_AND_TARGET = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)\s#]+)\)")


def linked(page: str) -> set[str]:
    """Return the files, relative to the root, that a page links to; a folder is all files in it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = {posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) for target in LINK.findall(text)}
    return {target for target in targets if (ROOT / target).is_file()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the site's files: the pages, and what is linked from them, and from what is linked."""
    found, waiting = set(), {*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())}
    while waiting:
        found |= waiting
        waiting = {target for name in waiting if name.endswith(".md") for target in linked(name)} - found
    theme = [
        file for file in files if file.abs_src_path is None or not Path(file.abs_src_path).is_relative_to(ROOT / "docs")
    ]
    return Files([*theme, *(File.generated(config, name, abs_src_path=str(ROOT / name)) for name in sorted(found))])


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave of a link to a folder its text: the site has no page that lists one."""
    at = ROOT / posixpath.dirname(page.file.src_uri)
    return TEXT_AND_TARGET.sub(lambda m: m[1] if (at / m[2]).is_dir() else m[0], markdown)
