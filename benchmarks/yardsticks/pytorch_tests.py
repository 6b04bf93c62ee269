"""PyTorch's own test files, read by path, with this backend in the place of the one that they compile with.

Any file: under ``PYTORCH_TEST_WITH_AOT_EAGER`` PyTorch compiles each test method, through ``TestCase.compile_fn``, which is
replaced. That setting also compiles backward by compiled autograd, which is turned off: AOTAutograd makes this backend's
backward. ``test/dynamo/test_activation_checkpointing.py``: its shapes of checkpointing, which ``_validate`` compiles with a
backend that counts operators; ``_validate`` is given this backend. What is written for ``"cuda"`` or ``"xpu"`` runs on the CPU.

The recipe is near, plain (fp32 by the reference lowering) or fp32, the tolerance `TOLERANCE`. Near has copies of 22 mantissa bits and exact products here: one test takes
the cosine of products in the thousands, which 18 bits put beyond any tolerance. A test that fails is run again with
torch's own ``aot_eager_decomp_partition``, or Inductor for fp32; what fails there too is left out. So is a test of which
Dynamo compiles nothing: it passes without the backend.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import sys
import unittest
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo.output_graph import OutputGraph
from torch._inductor import config as inductor

import fxprec
from benchmarks.architectures.mixed import EXACT_HIGH
from benchmarks.yardsticks import whole
from benchmarks.yardsticks.cells import BY_INDUCTOR, FAILED, LEFT_OUT, PASSED, REFUSED, TORCHS, Cell, Row, backend_of
from benchmarks.yardsticks.exercise import SEED
from fxprec import compat

TOLERANCE = 1e-3
COLUMNS = ("near", "plain", "fp32", *TORCHS)  # 16 and 8 bits are beyond the tolerance
_ELSEWHERE = re.compile(rb'(["\'.])(?:cuda|xpu)(["\']|\(\))')  # "cuda", .cuda(), and xpu likewise
_RAISED = re.compile(r"(?: *\| )*([\w.]*(?:Error|Exception|Unsupported|Warning)\b.*)")  # " | ": in an exception group


class _OnCpu(SourceFileLoader):
    """Loads a file with "cuda" and "xpu" read as "cpu", unless it makes tests for each type of device, thus for the CPU."""

    def get_data(self, path: str) -> bytes:
        text = super().get_data(path)
        is_for_each = b"instantiate_device_type_tests(" in text and b"only_for" not in text
        return text if is_for_each else _ELSEWHERE.sub(rb"\1cpu\2", text)

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)  # and caches nothing


def load(path: Path) -> list[unittest.TestCase]:
    """Return the tests of a file. To be called before anything imports torch's test utilities."""
    os.environ |= {
        "PYTORCH_TEST_WITH_AOT_EAGER": "1",
        "STRICT_DEFAULT": "1",
    }  # strict: what does not compile is an error
    from torch.testing._internal import common_cuda, common_utils, inductor_utils

    torch._dynamo.config.compiled_autograd = False
    for module, name, since in ((common_utils, "skipIfMps", lambda fn: fn), (common_cuda, "tf32_is_not_fp32", bool)):
        if not hasattr(module, name):  # of PyTorch 2.1's files
            setattr(module, name, since)
    inductor_utils.HAS_CUDA = inductor_utils.HAS_CUDA_AND_TRITON = True
    common_utils.TestCase.precision, common_utils.TestCase.rel_tol = TOLERANCE, TOLERANCE
    for root in (path.parent, path.parent.parent):
        sys.path.append(str(root))  # files import their neighbours
    loader = _OnCpu(path.stem, str(path))
    spec = importlib.util.spec_from_loader(path.stem, loader)
    assert spec is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = found
    loader.exec_module(found)
    vars(found).pop("load_tests", None)  # refuses tests that the running script does not define
    return list(_flat(unittest.defaultTestLoader.loadTestsFromModule(found)))


def _flat(suite: Any) -> Iterator[unittest.TestCase]:
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from _flat(one)
        else:
            yield one


def drawn(tests: list[unittest.TestCase], count: int | None) -> list[unittest.TestCase]:
    """Return ``count`` tests, by a fixed seed."""
    order = torch.randperm(len(tests), generator=torch.Generator().manual_seed(SEED)).tolist()
    return [tests[i] for i in sorted(order[: len(tests) if count is None else count])]


def _backend_of(column: str) -> Any:
    if column != "near":
        return backend_of(column)
    return fxprec.Backend(fxprec.Config(recipe=EXACT_HIGH, low_ratio=1.0, storage="packed", lowering="eager"))


def row(test: unittest.TestCase, columns: Sequence[str]) -> Row:
    """Run one test by each column, and again with torch's own backend if it fails."""
    found = Row(test.id())
    for column in columns:
        cell = _outcome(test, _backend_of(column))
        if cell.verdict == LEFT_OUT:
            found.left_out = cell.detail
            return found
        found.samples = 1
        own = "inductor" if column in BY_INDUCTOR else "aot"
        if cell.verdict == FAILED and column not in TORCHS:
            if own not in found.cells:
                found.add(own, _outcome(test, TORCHS[own]))
            if found.cells[own].verdict != PASSED:
                cell = Cell(LEFT_OUT, detail=f"torch's own {own}: {found.cells[own].detail}")
        found.add(column, cell)
    return found


def _outcome(test: unittest.TestCase, backend: Any) -> Cell:
    from torch.testing._internal.common_utils import TestCase

    torch._dynamo.reset()
    TestCase.compile_fn = lambda self, fn, _, nopython: torch._dynamo.optimize(backend, nopython=nopython)(fn)
    own = type(test)
    if hasattr(own, "_validate") and not hasattr(own._validate, "func"):
        validate = own._validate
        own._validate = lambda self, fn, _, *args, **named: validate(self, fn, self.chosen, *args, **named)
        own._validate.func = validate
    own.chosen = backend
    if hasattr(own, "_validate"):
        TestCase.compile_fn = lambda self, fn, _, nopython: fn  # the test itself compiles
    again = own(test._testMethodName)
    result = unittest.TestResult()
    compiler = OutputGraph.call_user_compiler
    with (
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
        inductor.patch(fallback_random=True, compile_threads=1),  # eager's random numbers; a fork has no pool
        mock.patch.object(OutputGraph, "call_user_compiler", autospec=True, side_effect=compiler) as compiled,
    ):
        again.run(result)
    if result.skipped:
        return Cell(LEFT_OUT, detail=f"skipped: {result.skipped[0][1]}".splitlines()[0])
    said = [text for _, text in result.errors + result.failures]
    if not said:
        return Cell(PASSED) if compiled.called else Cell(LEFT_OUT, detail="Dynamo compiles nothing of it")
    raised = [found[1] for line in said[0].splitlines() if (found := _RAISED.match(line))] or [""]
    is_ours = any(name in said[0] for name in _OURS)
    return Cell(REFUSED if is_ours else FAILED, detail=raised[-1][:300])


_OURS = (
    compat.CHECKED,  # which Dynamo says, and raises an error of its own
    *(
        f"{one.__module__}.{name}:"
        for name, one in vars(fxprec.errors).items()
        if isinstance(one, type) and issubclass(one, fxprec.errors.FxprecError) and name != "PassError"  # our fault
    ),
)


def chosen(path: Path, only: list[str], count: int | None) -> list[unittest.TestCase]:
    """Return the tests of these names, or ``count`` of all. Raises `FileNotFoundError`."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    return drawn([test for test in load(path) if not only or test.id() in only], count)


def rows(tests: list[unittest.TestCase], columns: Sequence[str], seconds: int) -> Iterator[Row]:
    """Yield a row a test, each run in a process of its own."""
    whole.warm(columns)
    for test in tests:
        yield whole.apart(test.id(), partial(row, test, columns), seconds)
