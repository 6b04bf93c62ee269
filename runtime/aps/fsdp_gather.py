"""All-gather FSDP2's parameters in few bits, through `FSDPModule.set_custom_all_gather`.

A rank sends its shard's matrices as blocks with a scale each, and the rest unchanged, in one message. All ranks decode
the same bytes, including their own, so forward and backward see the same weights everywhere. Shards stay exact.
Definitions: docs/algorithms.md, "Parameters in few bits".
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from fxprec.compat import gathered_dtypes, in_backward
from fxprec.errors import ConfigError, FormatError, FxprecWarning
from fxprec.numerics.blocks import BlockFormat, find
from fxprec.runtime import on_device
from fxprec.runtime.aps.exchange import all_gather, all_gather_into
from fxprec.runtime.aps.gathers import EIGHT_BITS
from fxprec.runtime.aps.hook import NO_CAPTURE
from fxprec.runtime.aps.shards import Shards, filled
from fxprec.runtime.aps.state import APSState
from fxprec.runtime.aps.wire import BlockWire, Wire

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


def wire_of_parameters(state: APSState, parameters: str | BlockFormat | None) -> Wire | None:
    """Return the wire of `use_aps`'s ``parameters=``, or None if the plan chooses or nothing is coded.

    Raises `ConfigError` for "by link" if the state does not plan by link, and `FormatError` for a format without
    blocks.
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
    """All-gather of one `FSDPModule`'s parameters in the codes of `wire`; None lets the state's plan choose.

    A new plan is followed from the next forward pass on, so that all passes of a step see the same weights.
    """

    def __init__(self, state: APSState, shards: Shards, wire: Wire | None, owner: FSDPModule) -> None:
        self.state = state
        self.wire = wire
        self._name = shards.name
        self._index = shards.index
        self._sizes = shards.sizes
        self._matrices = [p.dim() > 1 for p in shards.parameters]
        self._owner = owner
        self._now: Wire | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer, as FSDP2's default does."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Write all ranks' shards (n,) into `output_tensor` (world * n,), as they decode."""
        on_device.refuse_capture(input_tensor.device, "use_aps's all-gather runs", NO_CAPTURE)
        pieces = self._pieces(input_tensor)
        dtypes = [piece.dtype for piece in pieces if piece.coded]
        if not in_backward():
            self._now = self._coding(dtypes)
        coding = self._now
        try:
            if coding is None or not dtypes:
                work: dist.Work | None = all_gather_into(output_tensor, input_tensor, group=group, async_op=async_op)
                return work
            with torch.no_grad():
                message = _message(input_tensor.view(torch.uint8), coding, pieces)
                out = output_tensor.view(torch.uint8).view(dist.get_world_size(group), -1)
                _read(all_gather(message, group), coding, pieces, out)
        except RuntimeError as error:
            raise self.state.named(error) from error
        return None

    def _pieces(self, shard: Tensor) -> list[Piece]:
        """Return the pieces of a shard in order; warn and return none if the shard has another size.

        FSDP2 gathers bytes if dtypes differ: for frozen parameters, or by ``param_dtype_override_fn`` (torch 2.15).
        """
        dtypes = [shard.dtype] * len(self._sizes)
        if shard.dtype == torch.uint8:
            dtypes = gathered_dtypes(self._owner)
        rows = zip(self._sizes, dtypes, self._matrices, strict=True)
        pieces = [Piece(n * d.itemsize, d, matrix and d in _NUMBERS) for n, d, matrix in rows]
        known = sum(piece.size for piece in pieces)
        if known == shard.nbytes:
            return pieces
        warnings.warn(
            f"FSDP2 gathers {shard.nbytes} bytes a rank of {self._name}, whose parameters had {known} when use_aps was "
            "called: it is gathered as it is, in full precision; call use_aps after the model's last change",
            FxprecWarning,
            stacklevel=2,
        )
        return []

    def _coding(self, dtypes: Sequence[torch.dtype]) -> Wire | None:
        by_link = self.state.by_link
        if by_link is not None:
            by_link.meet(self.state.step)
        if self.state.is_high(self.state.step) or not dtypes:
            return None
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        return self.wire if self.wire is not None or by_link is None else by_link.gathered_as(self._index, widest)


class Piece(NamedTuple):
    """One parameter's shard as it is gathered."""

    size: int
    """Size in bytes."""
    dtype: torch.dtype
    coded: bool


def _message(shard: Tensor, coding: Wire, pieces: Sequence[Piece]) -> Tensor:
    """Return the bytes of a shard (bytes,): the codes of its matrices, then the rest."""
    split = list(zip(shard.split([piece.size for piece in pieces]), pieces, strict=True))
    values = torch.cat([filled(_typed(raw, piece.dtype)[None], coding.block) for raw, piece in split if piece.coded])
    return torch.cat([coding.encode(values), *(raw for raw, piece in split if not piece.coded)])


def _read(messages: Tensor, coding: Wire, pieces: Sequence[Piece], out: Tensor) -> None:
    """Decode messages (world, bytes) and write their shards into `out` (world, bytes)."""
    spans = [-(-piece.size // piece.dtype.itemsize // coding.block) * coding.block for piece in pieces if piece.coded]
    rest = [piece.size for piece in pieces if not piece.coded]
    codes, *raws = messages.split([messages.shape[1] - sum(rest), *rest], 1)
    decoded = coding.decode(codes.reshape(-1))
    values, others = iter(decoded.view(len(out), -1).split(spans, 1)), iter(raws)
    for view, piece in zip(out.split([piece.size for piece in pieces], 1), pieces, strict=True):
        if piece.coded:
            got = next(values)[:, : piece.size // piece.dtype.itemsize]
            view.copy_(got.to(piece.dtype).view(torch.uint8))
        else:
            view.copy_(next(others))


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as numbers of a dtype, copied if they are not aligned for it."""
    return (raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()).view(dtype)
