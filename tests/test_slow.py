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


def test_the_parts_that_commits_choose_from_take_equally_long() -> None:
    lengths = [0.0] * 10
    for name, seconds in listed().items():
        assert seconds > 0, name
        lengths[part_of(name, 10)] += seconds
    assert max(lengths) < 1.05 * min(lengths)
    assert part_of("README.md::line:66,column:1", 10) in range(10), "a page is not in the list"
