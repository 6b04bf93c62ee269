"""FSDP2's all-gather of parameters in few bits, through `FSDPModule.set_custom_all_gather`.

A rank sends its shard's matrices as blocks with a scale each, and the rest as it is, in one message. All ranks decode
the same bytes, their own among them, so forward and backward see the same weights everywhere. Shards stay exact.
Definitions: docs/algorithms.md, "Parameters in few bits".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from fxprec.compat import in_backward
from fxprec.errors import ConfigError, FormatError
from fxprec.numerics.blocks import BlockFormat, find
from fxprec.runtime import on_device
from fxprec.runtime.aps.exchange import all_gather, all_gather_into
from fxprec.runtime.aps.gathers import EIGHT_BITS
from fxprec.runtime.aps.shards import Shards, filled
from fxprec.runtime.aps.state import APSState
from fxprec.runtime.aps.wire import BlockWire, Coding, Wire, num_bytes

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


def wire_of_parameters(state: APSState, parameters: str | BlockFormat | None) -> Wire | None:
    """Return the wire of `use_aps`'s ``parameters=``, None where the plan chooses, or where nothing is coded.

    Raises `ConfigError` for "by link" without a plan to say it, and `FormatError` for a format without blocks.
    """
    if parameters is None:
        return None
    if parameters == "by link":
        if state.by_link is None:
            raise ConfigError("parameters='by link' needs a state with bits='by link'; add it, or name a format")
        return None
    fmt = find(parameters)
    if not isinstance(fmt, BlockFormat):
        raise FormatError(
            f"parameters={fmt.name!r} has one scale for a whole shard; give a block format, such as {EIGHT_BITS!r} or "
            "'mxfp8_e4m3'"
        )
    return BlockWire(fmt)


class APSAllGather(AllGather):
    """All-gather of one `FSDPModule`'s parameters in a wire's codes; None lets the state's plan choose.

    What the plan says is followed from the next forward pass on, so that a step's passes see the same weights.
    """

    def __init__(self, state: APSState, shards: Shards, wire: Wire | None) -> None:
        self.state = state
        self.wire = wire
        self._index = shards.index
        self._sizes = list(shards.sizes)
        self._coded = [p.dim() > 1 for p in shards.parameters]
        self._now: Coding = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a fresh buffer, as FSDP2's default."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Write all ranks' shards (n,) into `output_tensor` (world * n,), as they are after coding."""
        on_device.refuse_capture(input_tensor.device, "use_aps's all-gather runs", "in eager mode")
        if not in_backward():
            self._now = self._coding(input_tensor.dtype)
        coding, dtype = self._now, input_tensor.dtype
        if coding is None or coding == dtype or dtype not in _NUMBERS or input_tensor.numel() != sum(self._sizes):
            work: dist.Work | None = all_gather_into(output_tensor, input_tensor, group=group, async_op=async_op)
            return work
        with torch.no_grad():
            message = self._message(input_tensor, coding)
            self._read(all_gather(message, group), coding, output_tensor.view(dist.get_world_size(group), -1))
        return None

    def _coding(self, dtype: torch.dtype) -> Coding:
        by_link = self.state.by_link
        if by_link is not None:
            by_link.meet(self.state.step)
        if self.state.is_high(self.state.step) or not any(self._coded):
            return None
        return self.wire if self.wire is not None or by_link is None else by_link.gathered_as(self._index, dtype)

    def _message(self, shard: Tensor, coding: Wire | torch.dtype) -> Tensor:
        """Return the bytes of a shard (n,): the codes of its matrices, then the rest."""
        if isinstance(coding, torch.dtype):
            return shard.to(coding).view(torch.uint8)
        coded, rest = self._split(shard[None])
        codes = coding.encode(torch.cat([filled(piece, coding.block) for piece in coded]))
        return torch.cat([codes, *(piece.reshape(-1).view(torch.uint8) for piece in rest)])

    def _read(self, messages: Tensor, coding: Wire | torch.dtype, out: Tensor) -> None:
        """Write the shards that messages (world, bytes) hold into `out` (world, n)."""
        if isinstance(coding, torch.dtype):
            out.copy_(messages.view(coding))
            return
        coded, rest = self._split(out)
        spans = [piece.shape[1] + -piece.shape[1] % coding.block for piece in coded]
        codes, *others = messages.split([num_bytes(coding, sum(spans)), *(piece[0].nbytes for piece in rest)], 1)
        values = coding.decode(codes.reshape(-1)).view(len(out), -1)
        for piece, got in zip(coded, values.split(spans, 1), strict=True):
            piece.copy_(got[:, : piece.shape[1]])
        for piece, raw in zip(rest, others, strict=True):
            piece.copy_(raw.contiguous().view(out.dtype))

    def _split(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the pieces of rows (ranks, n) that are coded, and those that are not."""
        pieces = list(zip(rows.split(self._sizes, 1), self._coded, strict=True))
        return [p for p, coded in pieces if coded], [p for p, coded in pieces if not coded]
