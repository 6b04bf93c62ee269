"""Process groups for tests: ranks as processes on loopback, a free port each time, forked from one warm process."""

from __future__ import annotations

import io
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fxprec.errors import FxprecError

PRELOADED = [
    "torch.nn.parallel",
    "torch._dynamo",
    "torch._inductor.codecache",
    "torch._inductor.fx_passes.joint_graph",
    "fxprec.driver.named",
    "fxprec.driver.joint_compilation",  # and what a first compilation imports
    "fxprec.passes.lowering.lower",
    "fxprec.aps",
]


def _to_bytes(value: Any) -> bytes:
    """Shared memory would end with the rank."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _from_bytes(data: bytes | None) -> Any:
    return None if data is None else torch.load(io.BytesIO(data), weights_only=True)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank(rank: int, world: int, port: int, timeout: float, out: Any, work: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    try:
        out.put((rank, "ok", _to_bytes(work(rank, world, *args))))
    except BaseException:
        out.put((rank, "error", traceback.format_exc()))
    dist.destroy_process_group()


def run_ranks(world: int, work: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Run work(rank, world, *args) on every rank; return the results in rank order, or fail with the tracebacks.

    A rank that ends without a result counts as None.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    out = context.SimpleQueue()
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(r, world, port, timeout, out, work, args), daemon=True)
        for r in range(world)
    ]
    for p in processes:
        p.start()
    results: list[tuple[int, str, Any]] = []
    start = time.monotonic()
    while len(results) < world:
        assert time.monotonic() - start < 500, f"only {len(results)} of {world} ranks have ended"
        all_ended = not any(p.is_alive() for p in processes)
        while not out.empty():
            results.append(out.get())
        if all_ended:
            break
        time.sleep(0.02)
    for p in processes:
        p.join(30)
        p.kill()
    results += [(r, "lost", None) for r in set(range(world)) - {r for r, _, _ in results}]
    results.sort(key=lambda result: result[0])
    failed = [text for _, status, text in results if status == "error"]
    assert not failed, "\n".join(failed)
    return [_from_bytes(value) for _, _, value in results]


def several(rank: int, world: int, checks: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> dict[str, Any]:
    """Many checks in one process group: the function's name -> what it returned."""
    return {check.__name__: check(rank, world, *args) for check, args in checks}


def message_of(work: Callable[[], object]) -> str:
    """Return the type and text of the error that work ends in."""
    try:
        work()
    except (FxprecError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
