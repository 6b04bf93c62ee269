"""Inductor's cache folder: one that cannot be written is told in one line, and processes may share a fresh one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEP = """
import sys, torch, fxprec
torch.manual_seed(0)
net = torch.nn.Linear(8, 8)
compiled = torch.compile(net, backend="fxprec", options={"recipe": "hfp8"})
try:
    compiled(torch.ones(4, 8)).sum().backward()
except fxprec.FxprecError as error:
    sys.exit(f"{type(error).__mro__[1].__name__}: {error}")
print(net.weight.grad.double().sum().item())
"""
BOUND = 280  # seconds; less than the 300 that torch waits for its compile workers as a process ends


def start(folder: Path, *prefix: str) -> subprocess.Popen[str]:
    """A process of its own session, so that what it starts can be ended with it."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env |= {"TORCHINDUCTOR_VEC_ISA_OK": "1"}  # torch compiles no programs that ask what the processor has: 8 s a folder
    command = [*prefix, sys.executable, "-W", "ignore", "-c", STEP]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=BOUND)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def obeying_modes() -> list[str]:
    """Return what a command begins with, so that a superuser may not write what modes forbid either."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("a superuser writes everywhere, and there is no setpriv")
    less = "-dac_override,-dac_read_search"
    return ["setpriv", f"--bounding-set={less}", f"--inh-caps={less}"]


@pytest.mark.inductor
def test_a_folder_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    code, _, told = ended(start(tmp_path, *obeying_modes()))
    tmp_path.chmod(0o755)
    assert code == 1
    (line,) = [line for line in told.splitlines() if "cache folder" in line]
    assert line.startswith(f"LoweringError: Inductor's cache folder {tmp_path} cannot be used (Permission denied: ")
    assert line.endswith("; set TORCHINDUCTOR_CACHE_DIR to one that this process may write")


@pytest.mark.inductor
def test_processes_share_a_fresh_folder_and_one_that_is_killed_holds_up_none(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    both, killed = [start(folder) for _ in range(2)], start(folder)
    until = time.monotonic() + BOUND
    while not list(folder.glob("locks/*")):  # they compile
        assert time.monotonic() < until
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    results = [ended(process) for process in both]
    assert [code for code, _, _ in results] == [0, 0], results
    assert results[0][1] == results[1][1]
