"""Lead README's links and the project's URLs to where the source is published: ``absolute_links.py FOLDER URL TAG``.

A package index shows README without the files beside it. The repository's own README keeps relative links, which hold
in a clone and a fork. Standard library only.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#|mailto:)([^)\s]+)\)")


def absolute(text: str, url: str, tag: str) -> str:
    """Return Markdown whose relative links lead to files, and whose pictures to raw files, of a tag at ``url``."""

    def lead(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        return f"{picture}{label}({url}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return LINK.sub(lead, text)


def with_urls(pyproject: str, url: str) -> str:
    """Return the text of pyproject.toml with the project's URLs."""
    urls = {
        "Source": url,
        "Documentation": f"{url}/tree/HEAD/docs",
        "Changelog": f"{url}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    table = "".join(f'{name} = "{address}"\n' for name, address in urls.items())
    head, found, rest = pyproject.partition("[project.optional-dependencies]\n")
    assert found, "pyproject.toml has optional dependencies"
    return f"{head}[project.urls]\n{table}\n{found}{rest}"


def main(folder: str, url: str, tag: str = "HEAD") -> None:
    url = url.rstrip("/")
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", url):
        sys.exit(f"absolute_links: {url!r} is no address of a repository; give https://host/owner/name")
    for name, change in (
        ("README.md", lambda t: absolute(t, url, tag)),
        ("pyproject.toml", lambda t: with_urls(t, url)),
    ):
        path = Path(folder) / name
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
