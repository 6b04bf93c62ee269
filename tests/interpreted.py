"""Tests of Triton kernels on the CPU: Triton's interpreter must be chosen before a kernel is decorated."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run in a process of its own, below")


OLD_INTERPRETER = "only 0-dimensional arrays can be converted to Python scalars"


def run_interpreted(file: str, names: str = "triton_kernels_give") -> int:
    """Run those tests of ``file`` in a process of its own, under the interpreter; return how many passed."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", names],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if OLD_INTERPRETER in run.stdout:
        pytest.skip("the interpreter of this Triton (3.6) takes no NumPy 2.4 arrays as bounds of a loop")
    assert run.returncode == 0, run.stdout[-3000:]
    found = re.search(r"(\d+) passed", run.stdout)
    assert found is not None, run.stdout[-3000:]
    return int(found[1])
