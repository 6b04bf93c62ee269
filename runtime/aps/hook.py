"""The DDP communication hook, and the order in which its collectives run.

A bucket's exponents leave at once, on a process group of their own; its payload follows when those of all buckets
before it are through, on a second group. So exponents of one bucket travel beside the payload of the one before,
and each group sees its collectives in bucket order on every rank.
"""

# No postponed annotations here: DistributedDataParallel compares the hook's annotations as types.
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from fxprec.runtime.aps.bucket import Exchange, split_bucket
from fxprec.runtime.aps.state import APSState


def aps_hook(
    state: APSState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # absent from torch's annotations
) -> torch.futures.Future[torch.Tensor]:
    """Return a future of the bucket's mean gradient; for ``ddp.register_comm_hook(state, aps_hook)``.

    Raises torch.distributed's own error where a rank is lost. With one rank the gradient comes back as it is.
    """
    buffer = bucket.buffer()
    is_last = bucket.is_last()
    if state.groups.size == 1:
        state.step += is_last
        return _done(buffer)
    with torch.no_grad():
        parts = split_bucket(state, bucket.index(), buffer, bucket.gradients(), bucket.parameters())
        exchange = Exchange(state, parts)
        exchange.start()
    if buffer.is_cuda:
        with torch.no_grad():
            result = _done(exchange.finish())
        state.step += is_last
        return result
    return _queue(state, exchange, is_last)


def _done(buffer: Tensor) -> torch.futures.Future[torch.Tensor]:
    devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future


def _queue(state: APSState, exchange: Exchange, is_last: bool) -> torch.futures.Future[torch.Tensor]:
    """Finish the exchange on the state's worker thread, after all that were queued before."""
    if state.worker is None:
        state.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fxprec-aps")
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    state.worker.submit(_finish, state, exchange, is_last, future)
    return future


def _finish(state: APSState, exchange: Exchange, is_last: bool, future: torch.futures.Future[torch.Tensor]) -> None:
    try:
        with torch.no_grad():
            result = exchange.finish()
    except Exception as error:  # handed to the thread that waits in backward
        future.set_exception(error)  # type: ignore[arg-type]  # torch annotates it with the result type
        return
    finally:
        state.step += is_last
    future.set_result(result)
