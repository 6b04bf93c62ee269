"""Exchange gradients in a DDP communication hook, and order its collectives.

A bucket's exponents are sent at once, on a process group of their own, beside the payload of the buckets before it. The
later stages have a thread each, so while one bucket is on the wire the next is encoded and the last decoded. Each
process group still sees its collectives in bucket order on every rank. On a GPU the stages are queued on a stream of
their own: the backward pass continues, and waits for them at its end.
"""

# No postponed annotations here: DistributedDataParallel compares the hook's annotations as types.
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from fxprec.runtime import on_device
from fxprec.runtime.aps.bucket import Exchange, Part, settle, split_bucket
from fxprec.runtime.aps.exchange import set_mean
from fxprec.runtime.aps.low_rank import Late
from fxprec.runtime.aps.low_rank_exchange import LowRankExchange
from fxprec.runtime.aps.state import APSState
from fxprec.runtime.aps.wire import Sending

NO_CAPTURE = "and each step has scales of its own; run the backward pass outside of torch.cuda.graph"


def aps_hook(
    state: APSState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # absent from torch's annotations
) -> torch.futures.Future[torch.Tensor]:
    """Return a future of the bucket's mean gradient; for ``ddp.register_comm_hook(state, aps_hook)``.

    Raises torch.distributed's own error if a rank is lost, or `LostRankError` with ``bits="by link"``. With one rank
    the gradient is returned unchanged.
    """
    buffer = bucket.buffer()
    on_device.refuse_capture(buffer.device, "aps_hook runs", NO_CAPTURE)
    try:
        future = done(buffer) if state.groups.size == 1 else _exchange(state, bucket, buffer)
    except RuntimeError as error:
        raise state.named(error) from error
    state.step += bucket.is_last()  # exchanges under way keep the number of their step
    return future


def _exchange(
    state: APSState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # absent from torch's annotations
    buffer: Tensor,
) -> torch.futures.Future[torch.Tensor]:
    parameters, gradients = bucket.parameters(), _gradients(bucket)
    if state.by_link is not None:
        state.by_link.bucket_ready(state.step, bucket.index() == 0, parameters, gradients)
    if bucket.index() == 0:
        state.late = Late()
    sendings = {state.sending_of(p) for p in parameters}
    ends_late = bucket.is_last() and len(state.late.parts) > 0
    if len(sendings) == 1 and not ends_late and (sending := sendings.pop()) == Sending(sending.dtype):
        for parameter, view in zip(parameters, gradients, strict=True):
            settle(state, parameter, view)
        return _reduce(state, buffer, sending.dtype or buffer.dtype)
    with torch.no_grad():
        parts = split_bucket(state, bucket.index(), gradients, parameters)
    if not buffer.is_cuda:
        late = [part for part in parts if part.sending.low_rank]
        state.late.parts += late
        exchanges = _started(state, [part for part in parts if not part.sending.low_rank])
        return _queue(state, exchanges, buffer, is_last=bucket.is_last(), waits=len(late) > 0 or ends_late)
    stream = state.stream(buffer.device)
    stream.wait_stream(torch.cuda.current_stream(buffer.device))  # the stages start once the gradients are complete
    with torch.cuda.stream(stream), torch.no_grad():
        for exchange, name in product(_started(state, parts), _stages(state)):
            getattr(exchange, name)()
        return done(buffer)


def _gradients(bucket: dist.GradBucket) -> list[Tensor]:  # type: ignore[name-defined]  # absent from torch's annotations
    """Return views of a bucket's gradients, flat if one is complex: torch's views then have half of its numbers."""
    parameters: list[Tensor] = bucket.parameters()
    if any(p.is_complex() for p in parameters):
        return list(bucket.buffer().split([p.numel() << p.is_complex() for p in parameters]))
    found: list[Tensor] = bucket.gradients()
    return found


def _reduce(state: APSState, buffer: Tensor, dtype: torch.dtype) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket without codes in a dtype, without threads."""
    total = buffer.to(dtype)
    work = dist.all_reduce(total, group=state.groups.exponents, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(partial(_mean, state, buffer, total))
    return future


def _mean(state: APSState, buffer: Tensor, total: Tensor, reduced: "torch.futures.Future[list[Tensor]]") -> Tensor:
    try:
        reduced.value()
    except RuntimeError as error:
        raise state.named(error) from error
    set_mean(buffer, total, state.groups.size)
    return buffer


def _stages(state: APSState) -> tuple[str, ...]:
    names = Exchange.STAGES
    return names if state.groups.node is not None else tuple(n for n in names if n not in Exchange.OF_NODES)


def _started(state: APSState, parts: "Sequence[Part]") -> list[Exchange | LowRankExchange]:
    """Start the exchanges of a bucket's parts; return them with their exponents under way."""
    with torch.no_grad():
        exchanges = [LowRankExchange(state, [p]) if p.sending.low_rank else Exchange(state, p) for p in parts]
        for exchange in exchanges:
            exchange.start()
    return exchanges


def done(buffer: Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a finished future. On a GPU, waiting for it waits for the work queued on the current stream so far."""
    devices: list[int | str | torch.device] = [buffer.device] if buffer.is_cuda else []
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future


def _queue(
    state: APSState, exchanges: list[Exchange | LowRankExchange], buffer: Tensor, *, is_last: bool, waits: bool
) -> torch.futures.Future[torch.Tensor]:
    """Run the stages of the exchanges. Each stage has a thread of its own, which takes the exchanges in order.

    `waits`: the bucket is complete only after the exchange of all low-rank parts, which the last bucket starts.
    """
    late = state.late
    if is_last and late.parts:
        exchanges = [*exchanges, LowRankExchange(state, late.parts)]
    if not exchanges and not waits:
        return done(buffer)
    if not state.workers:
        state.workers = [ThreadPoolExecutor(1, thread_name_prefix=f"fxprec-aps-{name}") for name in _stages(state)]
    ended: torch.futures.Future[BaseException | None] = torch.futures.Future()
    finished: list[Future[None]] = []
    for exchange in exchanges:
        stages: list[Future[None]] = []
        for worker, name in zip(state.workers, _stages(state), strict=True):
            stages.append(worker.submit(_run_stage, exchange, name, stages[-1:]))
        finished.append(stages[-1])
    exchanged, waited = finished[-1:], [*finished, late.done] if waits else finished
    waited[-1].add_done_callback(lambda _: _deliver(state, ended, waited))
    if is_last and late.parts:
        exchanged[0].add_done_callback(late.end)
    return ended.then(partial(_result, buffer))


def _run_stage(exchange: Exchange | LowRankExchange, name: str, before: "Sequence[Future[None]]") -> None:
    """Run one stage after the exchange's stage before it, if any; raise what that stage raised."""
    for stage in before:
        stage.result()
    with torch.no_grad():
        getattr(exchange, name)()


def _deliver(
    state: APSState,
    ended: "torch.futures.Future[BaseException | None]",
    finished: "list[Future[None]]",
) -> None:
    """Report how the parts ended. All are done when the last is, because their last stage takes them in order."""
    errors = (part.exception() for part in finished)
    error = next((error for error in errors if error is not None), None)
    ended.set_result(None if error is None else state.named(error))


def _result(buffer: Tensor, ended: "torch.futures.Future[BaseException | None]") -> Tensor:
    """Return the buffer, or raise the error here: an error raised in a callback reaches backward with another text."""
    error = ended.value()
    if error is not None:
        raise error
    return buffer
