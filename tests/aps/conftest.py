"""Results of process groups, which take seconds to get, once for all workers of a test run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

Once = Callable[[str, Callable[[], Any]], Any]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """once(name, make): what make() returned, in this worker or in another, which is waited for."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def once(name: str, make: Callable[[], Any]) -> Any:
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = folder / f"{name}.pt"
            if not path.exists():
                torch.save(make(), path)
            return torch.load(path, weights_only=True)

    return once
