"""Tests of Triton kernels on the CPU, in Triton's interpreter.

It must be chosen before a kernel is decorated, so such tests run in a process of their own, and each process costs
seconds of imports. ``@interpreted`` marks a test; a folder's tests that a session selected run in one process, which the
first of them starts. Each then passes, fails or is skipped as it did there, and took as long.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

interpreted = pytest.mark.interpreted
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

OLD_INTERPRETER = "only 0-dimensional arrays can be converted to Python scalars"


@dataclass(frozen=True)
class Result:
    """Of one test: ``said`` is the text of its failure, or why it was skipped."""

    outcome: str
    said: str
    seconds: float

    def replay(self) -> None:
        """Raise what the test raised."""
        if OLD_INTERPRETER in self.said:
            pytest.skip("the interpreter of this Triton (3.6) takes no NumPy 2.4 arrays as bounds of a loop")
        if self.outcome == "skipped":
            pytest.skip(self.said)
        if self.outcome != "passed":
            pytest.fail(self.said, pytrace=False)


RESULT = pytest.StashKey[Result]()


def is_interpreted(item: pytest.Item) -> bool:
    return item.get_closest_marker("interpreted") is not None


def select(items: list[pytest.Item]) -> None:
    """In the interpreter's process, leave what is marked and nothing else."""
    if INTERPRETING:
        items[:] = filter(is_interpreted, items)


def run_there(item: pytest.Item, once: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Give a marked test the result that it has in the interpreter's process of its folder."""
    pytest.importorskip("triton")
    folder = item.path.parent
    ids = [i.nodeid for i in item.session.items if i.path.parent == folder and is_interpreted(i)]
    results = once(f"interpreted-{folder.name}", lambda: run(ids, item.config.rootpath))
    item.stash[RESULT] = Result(**results[item.nodeid])


def run(ids: Sequence[str], root: Path) -> dict[str, dict[str, Any]]:
    """Run tests under the interpreter; return each one's result as a dictionary, by its id."""
    with tempfile.TemporaryDirectory() as folder:
        report, arguments = Path(folder) / "report.xml", Path(folder) / "arguments.txt"
        options = ["-q", "--show-capture=no", "-p", "no:cacheprovider", "-m", "", f"--junitxml={report}"]
        arguments.write_text("\n".join([*options, *ids]), encoding="utf-8")
        process = subprocess.run(
            [sys.executable, "-m", "pytest", f"@{arguments}"],
            cwd=root,
            env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
            capture_output=True,
            text=True,
            timeout=570,
            check=False,
        )
        read = results(report) if report.exists() else {}
    lost = Result("failed", f"not run by the interpreter's process:\n{(process.stdout + process.stderr)[-3000:]}", 0.0)
    return {name: asdict(read.get(key(name), lost)) for name in ids}


def key(nodeid: str) -> tuple[str, str]:
    """Return the names that a JUnit report gives a test function."""
    path, _, name = nodeid.partition("::")
    return path.removesuffix(".py").replace("/", "."), name


def results(report: Path) -> dict[tuple[str, str], Result]:
    """Read a JUnit report. Of a test with several reports, as one that fails and is then torn down, the failure counts."""
    found: dict[tuple[str, str], Result] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        told = next(iter(case), None)
        if told is None or told.tag not in ("failure", "error", "skipped"):
            outcome, said = "passed", ""
        else:
            outcome, said = told.tag, (told.get("message", "") if told.tag == "skipped" else told.text or "")
        name = case.get("classname", ""), case.get("name", "")
        if outcome != "passed" or name not in found:
            found[name] = Result(outcome, said, float(case.get("time", 0)))
    return found
