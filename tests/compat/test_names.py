"""A backend by name: threads that ask torch for it at once all get it."""

from __future__ import annotations

import subprocess
import sys

import pytest

AT_ONCE = """
import sys, threading, torch, torch._dynamo
torch._dynamo.list_backends()
sys.setswitchinterval({interval})
barrier, made = threading.Barrier(8), []

def compile_first():
    barrier.wait()
    made.append(torch.compile(torch.nn.Linear(2, 2), backend="fxprec", options={{"recipe": "fp8", "lowering": "eager"}}))

threads = [threading.Thread(target=compile_first) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for compiled in made:
    compiled(torch.ones(2, 2)).sum().backward()
import fxprec
print(len(made), len({{fxprec.backend_of(compiled) for compiled in made}}))
"""


@pytest.mark.parametrize("interval", [1e-6, 5e-3])
def test_threads_that_compile_for_the_first_time(interval: float) -> None:
    """torch loads an entry point without a lock, and a second thread met "duplicate name: fxprec"."""
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE.format(interval=interval)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["8", "8"]
