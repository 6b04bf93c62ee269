"""What every test starts from: seeded, and nothing compiled by the test before it."""

from __future__ import annotations

import atexit
import fcntl
import gc
import logging
import os
import sys
import uuid
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# One worker a core: OpenMP's threads of one would spin for those of the other. And a peak depends on their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as it is today; Triton warns, once, that this will change

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own deprecated uses while it is imported
    import torch
    import torch._dynamo.guards
    import torch._inductor.compile_fx

    from fxprec.driver import compiled, option_checks

from documents import mark_blocks
from documents import pytest_collect_file as pytest_collect_file
from documents import reader as reader
from interpreted import INTERPRETING, RESULT, is_interpreted, run_there, select
from processors import AT_HAND, PINNED, plan_on
from slow import mark, part_and_parts, select_part

plan_on(pytest.MonkeyPatch(), PINNED)  # now: fixtures of modules and of the session plan too

# Of each graph, Dynamo times the guards for its log behind a flush of the processor's caches (20 ms), and then collects
# garbage (12 ms): a tenth of a small graph's compilation.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
torch._dynamo.config.run_gc_after_compile = False

# pytest listens to every logger that does not propagate. Torch's structured trace then has a reader, and each graph is
# printed for it; as in a user's process it has none, until TORCH_TRACE asks for one.
structured_trace = logging.getLogger("torch.__trace")
structured_trace.handlers.clear()
structured_trace.addHandler = lambda handler: None  # type: ignore[method-assign]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-part", type=part_and_parts, metavar="K/N", help="of tests/slow.txt, part K of N alone")


def pytest_configure(config: pytest.Config) -> None:
    # Dynamo looks at .grad of every input, and the input of a graph after a break is no leaf.
    config.addinivalue_line("filterwarnings", "ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.hookimpl(tryfirst=True)  # before -m selects by them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    select(items)
    mark(items)
    mark_blocks(items)
    select_part(config, items)


def pytest_report_header() -> str:
    return f"processor: {AT_HAND}; plans are tested for {PINNED}, and where a test depends on it for the one at hand"


def pytest_collection_finish() -> None:
    # 400,000 objects of the libraries stay: the collector need not walk them, nor look for cycles at every 700th object,
    # nor several times as pytest ends.
    gc.freeze()
    gc.set_threshold(20_000, 10, 20)
    atexit.register(gc.unfreeze)  # the interpreter frees what is left when it ends


_SESSION = uuid.uuid4().hex

# `./dev bf16` sets it. Tests that expect float32 models then fail; none may crash, hang or give garbage.
_DEFAULT_DTYPE: torch.dtype = getattr(torch, os.environ.get("FXPREC_TEST_DEFAULT_DTYPE", "float32"))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    torch.compiler.reset()
    if request.node.get_closest_marker("cpu_dependent"):
        plan_on(monkeypatch, AT_HAND)
    # No test takes what another, or the same one yesterday, has put into AOTAutograd's cache.
    monkeypatch.setattr(compiled, "sources", lambda: f"{_SESSION} {request.node.nodeid}")
    # Nor is a test told of allocators that the one before it asked for.
    monkeypatch.setattr(option_checks._process, "has_asked_for_system", False)
    # Nor does a backend of an earlier test, which an exception may keep alive, watch this one's optimizers.
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_pre_hooks", OrderedDict())
    torch.manual_seed(0)
    torch.set_default_dtype(_DEFAULT_DTYPE)
    yield
    torch.set_default_dtype(torch.float32)


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


@pytest.fixture(autouse=True)
def _in_the_interpreter(request: pytest.FixtureRequest, once: Once) -> None:
    if is_interpreted(request.node) and not INTERPRETING:
        run_there(request.node, once)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if RESULT not in pyfuncitem.stash:
        return None
    pyfuncitem.stash[RESULT].replay()
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when != "call" and RESULT in item.stash:
        report.duration = 0.0  # of the process, which the first test of a folder waits for
    elif RESULT in item.stash:
        report.duration = item.stash[RESULT].seconds
    return report
