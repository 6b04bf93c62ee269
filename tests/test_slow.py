"""The list of slow tests names tests that there are."""

from __future__ import annotations

import ast
from pathlib import Path

from slow import LIST, listed, part_of

ROOT = Path(__file__).parents[1]


def test_every_test_of_the_list_is_there() -> None:
    """One that was renamed would be in ``./dev``, however long it takes."""
    assert len(listed()) == len(LIST.read_text(encoding="utf-8").splitlines()), "each once"
    names: dict[str, set[str]] = {}
    for entry in listed():
        path, *_, name = entry.split("::")
        if path not in names:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            names[path] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in names[path], entry


def test_every_slow_test_is_in_one_of_the_parts_that_commits_choose_from() -> None:
    parts = [{name for name in listed() if part_of(name, 4) == k} for k in range(4)]
    assert sum(map(len, parts)) == len(listed())
    assert min(map(len, parts)) > len(listed()) / 5  # of about equal size, so none takes much longer
