"""All-gather FSDP2's parameters in few bits, through `FSDPModule.set_custom_all_gather`.

A rank sends its shard's matrices as blocks with a scale each, and the rest unchanged, in one message. All ranks decode
the same bytes, including their own, so forward and backward see the same weights everywhere. Shards stay exact. If the
state knows nodes, each message enters a node once. Definitions: docs/algorithms.md, "Parameters in few bits".
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from fxprec.compat import gathered_dtypes, in_backward
from fxprec.config.checks import integer
from fxprec.errors import ConfigError, FormatError, FxprecWarning
from fxprec.numerics.blocks import BlockFormat, find
from fxprec.runtime import on_device
from fxprec.runtime.aps.exchange import all_gather_into
from fxprec.runtime.aps.gathers import EIGHT_BITS, FOUR_BITS, Way
from fxprec.runtime.aps.hook import NO_CAPTURE
from fxprec.runtime.aps.nodes import Ranks
from fxprec.runtime.aps.pieces import Piece, numbers, read, rest
from fxprec.runtime.aps.shards import Shards
from fxprec.runtime.aps.state import APSState
from fxprec.runtime.aps.wire import BlockWire

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


def way_of_parameters(state: APSState, parameters: str | BlockFormat | None, exact_every: int | None) -> Way | None:
    """Return the way of `use_aps`'s ``parameters=``, or None if the plan chooses or nothing is coded.

    Raises `ConfigError` for "by link" if the state does not plan by link, and for an `exact_every` that is no number or
    has no gathers to count; `FormatError` for a format without blocks.
    """
    if exact_every is not None:
        integer("exact_every", exact_every, least=2)
        if parameters is None:
            raise ConfigError(
                f"exact_every={exact_every} counts gathers in codes, and parameters=None gathers as FSDP2 does; give "
                f"parameters='by link' or a format of differences, such as {FOUR_BITS!r}"
            )
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
    return Way(BlockWire(fmt), exact_every)


class APSAllGather(AllGather):
    """All-gather of one `FSDPModule`'s parameters in codes; None for `way` lets the state's plan choose.

    A new plan is followed from the next forward pass on, so that all passes of a step see the same weights.
    """

    def __init__(self, state: APSState, shards: Shards, way: Way | None, owner: FSDPModule) -> None:
        self.state = state
        self.way = way
        self._name = shards.name
        self._index = shards.index
        self._sizes = shards.sizes
        self._matrices = [p.dim() > 1 for p in shards.parameters]
        self._owner = owner
        self._now: Way | None = None

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
            self._now = self._chosen(dtypes)
        way = self._now if dtypes else None
        ranks = Ranks.of(group, self.state.groups)
        try:
            if way is None and ranks.node is None:
                work: dist.Work | None = all_gather_into(output_tensor, input_tensor, group=group, async_op=async_op)
                return work
            with torch.no_grad():
                shard, out = input_tensor.view(torch.uint8), output_tensor.view(torch.uint8).view(ranks.size, -1)
                self._gather(shard, way, pieces, ranks, out)
        except RuntimeError as error:
            raise self.state.named(error) from error
        return None

    def _gather(self, shard: Tensor, way: Way | None, pieces: Sequence[Piece], ranks: Ranks, out: Tensor) -> None:
        """Write all ranks' shards into `out` (ranks, bytes); of differences, backward gets what forward had."""
        if way is None:
            out.copy_(ranks.all_gather(shard))
        elif way.exact_every is None:
            codes = way.wire.encode(numbers(shard, pieces, way.wire.block))
            read(ranks.all_gather(torch.cat([codes, *rest(shard, pieces)])), way.wire, pieces, out)
        elif in_backward():
            out.copy_(self.state.differences_of(self._name).again(shard, ranks))
        else:
            kept = self.state.differences_of(self._name)
            out.copy_(kept.gathered(self._name, shard, way.wire, way.exact_every, pieces, ranks))

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

    def _chosen(self, dtypes: Sequence[torch.dtype]) -> Way | None:
        by_link = self.state.by_link
        if by_link is not None:
            by_link.meet(self.state.step)
        if self.state.is_high(self.state.step) or not dtypes:
            return None
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        return self.way if self.way is not None or by_link is None else by_link.gathered_as(self._index, widest)
