"""What a test marked ``interpreted`` says is what its process says."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted import OLD_INTERPRETER, Result, key, results, run

TESTS = """
import os
import pytest

def test_it_is_interpreted(): assert os.environ["TRITON_INTERPRET"] == "1"
@pytest.mark.parametrize("name", ["a::b", "c[d]"])
def test_cases(name): assert name == "a::b", "the words of a failure"
def test_left_out(): pytest.skip("a reason")
@pytest.fixture
def broken():
    yield
    raise RuntimeError("while it is torn down")
def test_torn_down(broken): pass
"""


def test_each_result_is_that_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(TESTS, encoding="utf-8")
    names = ["test_it_is_interpreted", "test_cases[a::b]", "test_cases[c[d]]", "test_left_out", "test_torn_down"]
    found = run([f"test_x.py::{name}" for name in names], tmp_path)
    given = [Result(**found[f"test_x.py::{name}"]) for name in names]
    assert [r.outcome for r in given] == ["passed", "passed", "failure", "skipped", "error"]
    given[0].replay()
    with pytest.raises(pytest.fail.Exception, match="the words of a failure"):
        given[2].replay()
    with pytest.raises(pytest.skip.Exception, match="a reason"):
        given[3].replay()
    with pytest.raises(pytest.fail.Exception, match="while it is torn down"):
        given[4].replay()


def test_a_test_that_was_not_run_fails(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("import os\ndef test_ends(): os._exit(3)\ndef test_next(): pass\n")
    found = run(["test_x.py::test_ends", "test_x.py::test_next"], tmp_path)
    assert {r["outcome"] for r in found.values()} == {"failed"}
    with pytest.raises(pytest.fail.Exception, match="not run by the interpreter's process"):
        Result(**found["test_x.py::test_next"]).replay()


def test_an_interpreter_that_is_too_old_is_no_failure() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"Triton \(3.6\)"):
        Result("failure", f"TypeError: {OLD_INTERPRETER}", 0.0).replay()


def test_of_two_reports_the_failure_counts(tmp_path: Path) -> None:
    case = '<testcase classname="a.test_b" name="test_c[x]" time="1.5">'
    (tmp_path / "r.xml").write_text(f"<s>{case}</testcase>{case}<error>late</error></testcase></s>", encoding="utf-8")
    assert results(tmp_path / "r.xml") == {key("a/test_b.py::test_c[x]"): Result("error", "late", 1.5)}
