"""Commands that README and docs show: the command line takes them, and modules that they run exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from fxprec import cli

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "examples/README.md",
]
COMMAND = re.compile(r"(?:\$ )?((?:fxprec (?:--)?[a-z]|python -m [a-z]).*)")
SAID = re.compile(r"fxprec [\w, ]+: |fxprec (?:graph|group) N")  # a line of output, a range of the profiler


def in_blocks(page: Path) -> Iterator[str]:
    """Yield the commands of a page's blocks of commands and output."""
    fence = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fence = "" if fence else line
        elif fence in ("```", "```sh", "```bash", "```console") or (not fence and line.startswith("    ")):
            found = (COMMAND.fullmatch(part.strip()) for part in line.split("&&"))
            yield from (match[1] for match in found if match and not SAID.match(match[1]))


def in_prose(page: Path) -> Iterator[str]:
    """Yield the commands that a page quotes."""
    found = (COMMAND.fullmatch(text) for text in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))
    yield from (match[1] for match in found if match and not SAID.match(match[1]))


def words_of(command: str) -> list[str]:
    """Return a command's words, without a comment and a pipe."""
    return shlex.split(re.split(r"\s[#|>]", command)[0])


BLOCKS = sorted({command for page in PAGES for command in in_blocks(page)})
QUOTED = sorted({command for page in PAGES for command in in_prose(page)})
GROUP = typer.main.get_command(cli.app)


def options_of(name: str) -> set[str]:
    command = GROUP if name.startswith("--") else GROUP.commands[name]  # type: ignore[attr-defined]
    return {"--help"} | {text for option in command.params for text in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize("command", [c for c in BLOCKS if c.startswith("fxprec ")])
def test_the_command_line_takes_what_a_block_shows(command: str) -> None:
    _, name, *rest = words_of(command)
    with GROUP.commands[name].make_context(name, rest):  # type: ignore[attr-defined]
        pass


@pytest.mark.parametrize("command", [c for c in QUOTED if c.startswith("fxprec ")])
def test_a_command_that_is_quoted_has_its_options(command: str) -> None:
    _, name, *rest = words_of(command)
    shown = {word.partition("=")[0].rstrip(",") for word in (name, *rest) if word.startswith("--")}
    assert shown <= options_of(name)


@pytest.mark.parametrize("command", [c for c in BLOCKS + QUOTED if c.startswith("python -m ")])
def test_the_module_that_is_run_exists(command: str) -> None:
    assert importlib.util.find_spec(words_of(command)[2]) is not None
