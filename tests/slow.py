"""Which tests are left to ``./dev all``: those that took more than a second in the run that `slow.txt` was made from.

Each line is a test function and its seconds. ``python tests/slow.py build/tests.xml``, where
``pytest --junitxml=build/tests.xml`` has run all tests on an idle machine, writes the list anew. A test that is not in it,
as one just written, belongs to ``./dev``.

``pytest --slow-part K/N`` runs the K-th of N parts of them, K from 0, and all others. Parts take equally long, and a file's
tests are in one part, since they share fixtures.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
import zlib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("slow.txt")
SECONDS = 1.0
"""Of all cases of a test function together."""


@cache
def listed() -> dict[str, float]:
    """Return the list: a test function's name -> its seconds."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return {name: float(seconds) for name, _, seconds in (line.partition(" ") for line in lines)}


def name_of(item: pytest.Item) -> str:
    """Return ``tests/test_x.py::test_y``, without the case."""
    return item.nodeid.partition("[")[0]


def mark(items: list[pytest.Item]) -> None:
    """Give the tests of the list the marker ``slow``, unless they are in ``./dev`` whatever they take."""
    for item in items:
        if name_of(item) in listed() and item.get_closest_marker("core") is None:
            item.add_marker(pytest.mark.slow)


def select_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the slow tests of all parts but that of ``--slow-part``."""
    asked: tuple[int, int] | None = config.getoption("slow_part")
    if asked is None:
        return
    part, parts = asked
    is_left = [i.get_closest_marker("slow") is not None and part_of(name_of(i), parts) != part for i in items]
    config.hook.pytest_deselected(items=[i for i, left in zip(items, is_left, strict=True) if left])
    items[:] = [i for i, left in zip(items, is_left, strict=True) if not left]


def part_of(name: str, parts: int) -> int:
    """Return the part of a test. A page, whose slow blocks are not in the list, is in a part by its name."""
    file = name.partition("::")[0]
    return dealt(parts).get(file, zlib.crc32(file.encode()) % parts)


@cache
def dealt(parts: int) -> dict[str, int]:
    """Return each file's part: the longest file first, each to the part that is shortest so far."""
    files: dict[str, float] = defaultdict(float)
    for name, seconds in listed().items():
        files[name.partition("::")[0]] += seconds
    lengths = [0.0] * parts
    found = {}
    for file in sorted(files, key=lambda file: (-files[file], file)):
        found[file] = lengths.index(min(lengths))
        lengths[found[file]] += files[file]
    return found


def part_and_parts(text: str) -> tuple[int, int]:
    """Read ``K/N``. Raises ``ValueError`` where it is none."""
    part, parts = map(int, text.split("/"))
    if not 0 <= part < parts:
        raise ValueError(text)
    return part, parts


def measured(report: Path) -> dict[str, float]:
    """Return the seconds of each test function of a JUnit file."""
    found: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        module, _, group = case.get("classname", "").partition(".Test")
        scopes = [f"{module.replace('.', '/')}.py", *(f"Test{group}" for _ in group[:1]), case.get("name", "")]
        found["::".join(scopes).partition("[")[0]] += float(case.get("time", 0))
    return found


if __name__ == "__main__":
    slow = {name: seconds for name, seconds in sorted(measured(Path(sys.argv[1])).items()) if seconds > SECONDS}
    LIST.write_text("".join(f"{name} {seconds:.0f}\n" for name, seconds in slow.items()), encoding="utf-8")
    print(f"{len(slow)} tests take more than {SECONDS} s")
