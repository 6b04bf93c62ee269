"""Items that fail in every way an item can, and one that passes: run by `test_gpu_check`, each in its process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

from fxprec.gpu_check.ground import Ground, require, within
from fxprec.gpu_check.items import Item

NAMES = ("passes", "raises", "exits", "leaves", "crashes", "hangs", "skips", "last")
ITEMS = tuple(Item(name, name, f"gpu.faults_of.{name}") for name in NAMES)
CHILD = "FXPREC_TEST_CHILD"
"""Environment variable: the file that the hanging item writes the id of a process it has started to."""


def passes(ground: Ground) -> None:
    with ground.case("adds"):
        within("one and one", 1 + 1, 2)
    ground.fact("sum", 2)


def raises(ground: Ground) -> None:
    with ground.case("wrong"):
        require(False, "codes: 3 of 8 differ")
    with ground.case("after it"):
        raise ValueError("no such kernel\nand more")
    with ground.case("right"):
        pass


def exits(ground: Ground) -> None:
    with ground.case("exits in the middle"):
        print("CUDA error: an illegal memory access", flush=True)
        os._exit(3)


def leaves(ground: Ground) -> None:
    with ground.case("leaves as if all was well"):
        os._exit(0)


def crashes(ground: Ground) -> None:
    with ground.case("reads address 0"):
        ctypes.string_at(0)


def hangs(ground: Ground) -> None:
    with ground.case("waits for ever"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(os.environ[CHILD]).write_text(str(child.pid), encoding="utf-8")
        time.sleep(1000)


def skips(ground: Ground) -> None:
    ground.leave_out("a second GPU", "one GPU")


def last(ground: Ground) -> None:
    passes(ground)


def wrong_code(ground: Ground) -> None:
    """Check the casts as they are, but that the kernel's first code has its lowest bit turned."""
    from fxprec.gpu_check import casts

    right = casts.quantize_transpose

    def wrong(x, row, fmt, **options):  # type: ignore[no-untyped-def]
        q, t, counts = right(x, row, fmt, **options)
        if fmt.name == "1-5-2" and q.numel():
            q.view(-1)[0] ^= 1
        return q, t, counts

    with mock.patch.object(casts, "quantize_transpose", wrong):
        casts.check(ground)
