"""Process groups for tests: ranks as spawned processes on loopback, a free port each time."""

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
    context = mp.get_context("spawn")
    out = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(r, world, port, timeout, out, work, args), daemon=True)
        for port in [free_port()]
        for r in range(world)
    ]
    for p in processes:
        p.start()
    results = []
    while len(results) < world:
        while not out.empty():
            results.append(out.get())
        silent = sum(not p.is_alive() for p in processes)
        if out.empty() and len(results) + sum(p.exitcode not in (None, 0) for p in processes) >= world and silent:
            break
        time.sleep(0.05)
    for p in processes:
        p.join(30)
    results += [(r, "lost", None) for r in set(range(world)) - {r for r, _, _ in results}]
    results.sort(key=lambda result: result[0])
    failed = [text for _, status, text in results if status == "error"]
    assert not failed, "\n".join(failed)
    return [_from_bytes(value) for _, _, value in results]
