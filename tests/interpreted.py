"""Tests of Triton kernels on the CPU, in one process for all files of a session.

Triton's interpreter must be chosen before a kernel is decorated, so a process of its own; and each costs seconds of
imports. ``@interpreted`` marks what runs there; a test that takes the fixture ``interpreted_tests`` starts it. Tests that are marked ``full``
as well run in another process, which a test that takes the fixture ``interpreted_in_full`` starts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

interpreted = pytest.mark.interpreted
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
STARTS = frozenset({"interpreted_tests", "interpreted_in_full"})

OLD_INTERPRETER = "only 0-dimensional arrays can be converted to Python scalars"


def starts(item: pytest.Item) -> bool:
    """Return whether a test takes a fixture that starts the interpreter's process."""
    return not STARTS.isdisjoint(getattr(item, "fixturenames", ()))


def select(items: list[pytest.Item]) -> None:
    """Leave what is marked to the interpreter's process, and nothing else."""
    marked = [i for i in items if i.get_closest_marker("interpreted") and not starts(i)]
    if INTERPRETING:
        items[:] = marked
    for item in marked if not INTERPRETING else ():
        item.add_marker(pytest.mark.skip(reason="run in a process of its own, below"))


def files_of(items: Sequence[pytest.Item]) -> list[str]:
    """Return the files of a session with a test that starts the interpreter."""
    return sorted({str(i.path) for i in items if starts(i)})


@dataclass(frozen=True)
class InterpretedTests:
    """What a run of marked tests printed."""

    output: str
    returncode: int

    def passed(self, path: str) -> int:
        """Return how many tests of a file passed. Fails where one failed, skips where the interpreter is too old."""
        name = re.escape(Path(path).name)
        if self.returncode not in (0, 1) or re.search(rf"^(FAILED|ERROR) .*/{name}\b", self.output, re.MULTILINE):
            if OLD_INTERPRETER in self.output:
                pytest.skip("the interpreter of this Triton (3.6) takes no NumPy 2.4 arrays as bounds of a loop")
            pytest.fail(re.sub(r"^PASSED .*\n", "", self.output, flags=re.MULTILINE)[-3000:])
        return len(re.findall(rf"^PASSED .*/{name}::", self.output, re.MULTILINE))


def run_interpreted(files: Sequence[str], marks: str = "not full") -> dict[str, str | int]:
    """Run the tests of those files that are marked for it, and that ``marks`` selects, under the interpreter."""
    options = ["-q", "-rA", "--show-capture=no", "-p", "no:cacheprovider", "-m", marks]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    return {"output": run.stdout + run.stderr, "returncode": run.returncode}
