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
    is_last = bucket.is_last()
    if state.groups.size == 1:
        state.step += is_last
        return done(buffer)
    try:
        return _exchange(state, bucket, buffer, is_last)
    except RuntimeError as error:
        raise state.named(error) from error


def _exchange(
    state: APSState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # absent from torch's annotations
    buffer: Tensor,
    is_last: bool,
) -> torch.futures.Future[torch.Tensor]:
    if state.by_link is not None:
        state.by_link.bucket_ready(state.step, bucket.index() == 0, bucket.parameters(), bucket.gradients())
    if bucket.index() == 0:
        state.late = Late()
    parameters = bucket.parameters()
    sendings = {state.sending_of(p) for p in parameters}
    waits = is_last and len(state.late.parts) > 0
    if len(sendings) == 1 and not waits and (sending := sendings.pop()) == Sending(sending.dtype):
        for parameter, view in zip(parameters, bucket.gradients(), strict=True):
            settle(state, parameter, view)
        return _reduce(state, buffer, sending.dtype or buffer.dtype, is_last)
    if not buffer.is_cuda:
        parts = _split(state, bucket)
        late = [part for part in parts if part.sending.low_rank]
        state.late.parts += late
        exchanges = _started(state, [part for part in parts if not part.sending.low_rank])
        return _queue(state, exchanges, buffer, is_last, waits=len(late) > 0 or waits)
    stream = state.stream(buffer.device)
    stream.wait_stream(torch.cuda.current_stream(buffer.device))  # the stages start once the gradients are complete
    with torch.cuda.stream(stream), torch.no_grad():
        for exchange, name in product(_started(state, _split(state, bucket)), _stages(state)):
            getattr(exchange, name)()
        state.step += is_last
        return done(buffer)


def _reduce(state: APSState, buffer: Tensor, dtype: torch.dtype, is_last: bool) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket without codes in a dtype, without threads."""
    total = buffer.to(dtype)
    work = dist.all_reduce(total, group=state.groups.exponents, async_op=True)
    state.step += is_last
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


def _split(
    state: APSState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # absent from torch's annotations
) -> list[Part]:
    with torch.no_grad():
        return split_bucket(state, bucket.index(), bucket.gradients(), bucket.parameters())


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
    state: APSState, exchanges: list[Exchange | LowRankExchange], buffer: Tensor, is_last: bool, *, waits: bool
) -> torch.futures.Future[torch.Tensor]:
    """Run the stages of the exchanges. Each stage has a thread of its own, which takes the exchanges in order.

    `waits`: the bucket is complete only after the exchange of all low-rank parts, which the last bucket starts.
    """
    late = state.late
    if is_last and late.parts:
        exchanges = [*exchanges, LowRankExchange(state, late.parts)]
    if not exchanges and not waits:
        state.step += is_last
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
    waited[-1].add_done_callback(lambda _: _deliver(state, is_last, ended, waited))
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
    is_last: bool,
    ended: "torch.futures.Future[BaseException | None]",
    finished: "list[Future[None]]",
) -> None:
    """Report how the parts ended. All are done when the last is, because their last stage takes them in order."""
    state.step += is_last
    errors = (part.exception() for part in finished)
    error = next((error for error in errors if error is not None), None)
    ended.set_result(None if error is None else state.named(error))


def _result(buffer: Tensor, ended: "torch.futures.Future[BaseException | None]") -> Tensor:
    """Return the buffer, or raise the error here: an error raised in a callback reaches backward with another text."""
    error = ended.value()
    if error is not None:
        raise error
    return buffer
