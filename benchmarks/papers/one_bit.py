"""Gradients in one bit with error feedback: the baseline that Dettmers 2016 (section 4.2) holds 8 bits against.

Source: Seide, Fu, Droppo, Li and Yu 2014, "1-Bit Stochastic Gradient Descent". A number is sent as its sign, and
decoded as the mean of the numbers of that sign in its row. The difference is added to the row's next gradient. The
owner of a chunk adds the decoded gradients, codes the sum in the same way with an error of its own, and sends it back.
"""

# No postponed annotations here: DistributedDataParallel compares the hook's annotations as types.
from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fxprec.runtime import on_device
from fxprec.runtime.aps.exchange import all_gather, to_owners
from fxprec.runtime.aps.groups import agree, parent_of
from fxprec.runtime.aps.hook import NO_CAPTURE, done
from fxprec.runtime.aps.layout import Layout, layout

_VALUE_BYTES = 4


def quantize(x: Tensor, slots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return signs (bool, x >= 0) of x (n,), and each sign's mean in each of ``count`` slots (count, 2), float32.

    ``slots`` (n,) int64 says where each number belongs. A sign that a slot lacks has mean 0.
    """
    positive = x >= 0
    keys = 2 * slots + positive
    sums = torch.zeros(2 * count, dtype=torch.float64, device=x.device).index_add_(0, keys, x.double())
    numbers = _counted(keys, 2 * count).clamp_(min=1)
    return positive, (sums / numbers).to(torch.float32).view(count, 2)


def _counted(keys: Tensor, count: int) -> Tensor:
    """Return how often each of ``count`` keys occurs, int64. A GPU's bincount waits for the stream."""
    if not keys.is_cuda:
        return torch.bincount(keys, minlength=count)
    return torch.zeros(count, dtype=torch.int64, device=keys.device).index_add_(0, keys, torch.ones_like(keys))


def dequantize(positive: Tensor, slots: Tensor, means: Tensor) -> Tensor:
    """Return the values (n,) of signs."""
    return means.view(-1)[2 * slots + positive]


class _Rows:
    """A bucket's rows cut at the borders of chunks, numbered within each chunk; the last number is the padding's."""

    def __init__(self, lay: Layout) -> None:
        self.lay = lay
        self.count = lay.max_pieces + 1
        self.bits = -(-lay.chunk // 8)
        self._runs_on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @cached_property
    def _slots(self) -> Tensor:
        return self._expanded(*self._runs)

    @cached_property
    def _runs(self) -> tuple[Tensor, Tensor]:
        """Return the number of each row in its chunk, and its elements, int64 (rows + 1,)."""
        owned = [list(enumerate(self.lay.owned(rank))) for rank in range(self.lay.num_ranks)]
        numbers = [number for mine in owned for number, _ in mine] + [self.count - 1]
        sizes = [piece.end - piece.start for mine in owned for _, piece in mine]
        sizes.append(self.lay.padded - self.lay.total)
        return (
            torch.tensor(numbers, dtype=torch.int64, device="cpu"),
            torch.tensor(sizes, dtype=torch.int64, device="cpu"),
        )

    def _expanded(self, numbers: Tensor, sizes: Tensor) -> Tensor:
        return numbers.repeat_interleave(sizes, output_size=self.lay.padded).view(self.lay.num_ranks, -1)

    def slots(self, device: torch.device) -> Tensor:
        """Return the number of each element's row in its chunk, int64 (ranks, chunk).

        A GPU gets two numbers a row, once, and makes those of the elements itself.
        """
        if device.type == "cpu":
            return self._slots
        if device not in self._runs_on:
            numbers, sizes = (on_device.uploaded_for_good(x, device) for x in self._runs)
            self._runs_on[device] = numbers, sizes
        return self._expanded(*self._runs_on[device])

    def coded(self, chunk: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the message of one rank's chunk (chunk,), whose ``slots`` are given, and the values it decodes to."""
        positive, means = quantize(chunk, slots, self.count)
        padded = torch.nn.functional.pad(positive.to(torch.uint8), (0, 8 * self.bits - len(positive)))
        packed = (padded.view(-1, 8) << _shifts(chunk.device)).sum(1, dtype=torch.uint8)
        return torch.cat([means.view(-1).view(torch.uint8), packed]), dequantize(positive, slots, means)

    def decoded(self, message: Tensor, slots: Tensor) -> Tensor:
        """Return the values (chunk,) of a message of one rank's chunk, whose ``slots`` are given."""
        size = 2 * self.count * _VALUE_BYTES
        means = message[:size].clone().view(torch.float32)
        positive = (message[size:, None] >> _shifts(message.device) & 1).view(-1)[: self.lay.chunk].to(torch.int64)
        return dequantize(positive, slots, means)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


@lru_cache(maxsize=1024)
def _rows(sizes: tuple[int, ...], num_ranks: int) -> _Rows:
    return _Rows(layout(sizes, num_ranks))


class OneBitState:
    """State for ``ddp.register_comm_hook(state, one_bit_hook)``: a bit a number and two float32 a row each way.

    A row is what one output of a layer reads: index 0 of a weight; a vector is one row. Construct it after
    ``init_process_group``, on every rank of ``process_group``; raises `ConfigError` without, and where ranks differ.
    ``error_feedback=False`` forgets what rounding took, to show what the feedback is worth.
    """

    def __init__(self, *, error_feedback: bool = True, process_group: dist.ProcessGroup | None = None) -> None:
        self.error_feedback = error_feedback
        self.group = parent_of(process_group, "OneBitState")
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        agree(f"1-bit, error_feedback={error_feedback}", self.group)
        self.lost: dict[str, WeakTensorKeyDictionary] = {
            "gradients": WeakTensorKeyDictionary(),
            "sums": WeakTensorKeyDictionary(),
        }
        """What rounding took, by parameter, from this rank's gradients and from the sums of the rows it owns."""

    def mean(self, layers: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        """Return the mean over ranks of flat float32 gradients, as it arrives on all of them (elements,)."""
        rows = _rows(tuple(size for p in parameters for size in row_sizes(p)), self.size)
        flat = self._with_lost("gradients", torch.cat(list(layers)), parameters)
        mine = slice(self.rank * rows.lay.chunk, (self.rank + 1) * rows.lay.chunk)
        owed = self._with_lost("sums", torch.zeros_like(flat), parameters)
        kept = _padded(owed, rows)[mine].clone()
        owed[mine] = 0  # DDP forms its buckets anew after the first step: what others own now goes with the gradient
        flat += owed
        chunks = _padded(flat, rows).view(self.size, -1)
        slots = rows.slots(flat.device)
        messages, arrived = zip(*map(rows.coded, chunks, slots), strict=True)
        self._keep("gradients", flat - torch.cat(arrived)[: len(flat)], parameters)
        size = messages[0].numel()
        received = to_owners(torch.cat(messages), size * self.size, self.size, self.group)
        total = kept
        for message in received:
            total = total + rows.decoded(message, slots[self.rank])
        message, sent = rows.coded(total, slots[self.rank])
        lost = torch.zeros(rows.lay.padded, dtype=torch.float32, device=flat.device)
        lost[mine] = total - sent
        self._keep("sums", lost[: len(flat)], parameters)
        found = all_gather(message, self.group)
        return torch.cat([*map(rows.decoded, found, slots)])[: len(flat)] / self.size

    def _with_lost(self, kind: str, flat: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        for part, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True):
            if p in self.lost[kind]:
                part += self.lost[kind][p]
        return flat

    def _keep(self, kind: str, lost: Tensor, parameters: Sequence[Tensor]) -> None:
        if self.error_feedback:
            finite = torch.nan_to_num(lost, nan=0.0, posinf=0.0, neginf=0.0)
            for part, p in zip(finite.split([p.numel() for p in parameters]), parameters, strict=True):
                self.lost[kind][p] = part


def _padded(flat: Tensor, rows: _Rows) -> Tensor:
    return torch.nn.functional.pad(flat, (0, rows.lay.padded - len(flat)))


def row_sizes(parameter: Tensor) -> list[int]:
    """Return the elements of each row of a parameter."""
    if parameter.dim() < 2 or not parameter.numel():
        return [parameter.numel()]
    return [parameter.numel() // len(parameter)] * len(parameter)


def one_bit_hook(
    state: OneBitState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # absent from torch's annotations
) -> torch.futures.Future[torch.Tensor]:
    """Return a future of the bucket's mean gradient; for ``ddp.register_comm_hook(state, one_bit_hook)``.

    A gradient with an inf or a NaN arrives with one. With one rank the gradient comes back as it is.
    """
    on_device.refuse_capture(bucket.buffer().device, "one_bit_hook runs", NO_CAPTURE)
    if state.size > 1 and bucket.buffer().numel():
        with torch.no_grad():
            views = bucket.gradients()
            layers = [view.reshape(-1).to(torch.float32) for view in views]
            mean = state.mean(layers, bucket.parameters())
            for view, layer in zip(views, mean.split([view.numel() for view in views]), strict=True):
                view.copy_(layer.view_as(view))
    return done(bucket.buffer())
