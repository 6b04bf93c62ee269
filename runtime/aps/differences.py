"""Gather parameters as what they have changed since the last gather.

Every rank keeps a module's parameters as all ranks last decoded them. A rank sends the difference between its shard
and its part of them, coded, and all ranks add the same codes to the same values. What a code loses is in the next
difference, so errors do not add up. SDP4Bit (Jia et al. 2024, arXiv 2410.15526) sends differences in 4 bits too.
Definitions: docs/algorithms.md, "Parameters in few bits".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxprec.runtime.aps.groups import agree
from fxprec.runtime.aps.nodes import Ranks
from fxprec.runtime.aps.pieces import Piece, numbers, read, rest
from fxprec.runtime.aps.wire import Wire

MOST_LOST = 3.6e-5
"""Share of a shard's squared norm that a coded difference may lose: what gathers in 8 bits lose of normal weights."""


class Differences:
    """One FSDP2 module's parameters as all ranks last decoded them."""

    def __init__(self, own: Tensor | None = None, age: int = 0) -> None:
        self._values: Tensor | None = None
        """(ranks, bytes); None before the first gather."""
        self._age = age
        """Gathers since the parameters were gathered as they are."""
        self._own = own
        """This rank's part (bytes,) of the values, if a run continues that was saved."""
        self._rank = 0

    @classmethod
    def resumed(cls, saved: Mapping[str, Any]) -> Differences:
        """Return the differences that `to_save` has described."""
        return cls(saved["own"], int(saved["age"]))

    def to_save(self) -> dict[str, Any]:
        """Return the data to resume from: this rank's part of the values, and the gathers since an exact one."""
        own = self._own if self._values is None else self._values[self._rank]
        return {"own": None if own is None else own.clone(), "age": self._age}

    def gathered(
        self, name: str, shard: Tensor, wire: Wire, exact_every: int, pieces: Sequence[Piece], ranks: Ranks
    ) -> Tensor:
        """Send what a shard (bytes,) has changed, and return all ranks' shards (ranks, bytes) as they decode.

        Every `exact_every`-th gather sends shards as they are, and so does one whose codes would lose more than
        `MOST_LOST` on some rank: after a checkpoint was loaded, for instance, or if a weight is not finite. On a GPU
        the host waits for the codes to know. Raises `ConfigError` if ranks do not begin together.
        """
        with torch.inference_mode(False), torch.no_grad():  # training adds to values that an evaluation has gathered
            return self._gathered(name, shard, wire, exact_every, pieces, ranks)

    def _gathered(
        self, name: str, shard: Tensor, wire: Wire, exact_every: int, pieces: Sequence[Piece], ranks: Ranks
    ) -> Tensor:
        if self._values is None:
            self._begin(name, ranks)
        kept = self._values
        if kept is not None and kept.shape == (ranks.size, shard.numel()) and self._age + 1 < exact_every:
            messages = ranks.all_gather(_message(shard, kept[ranks.rank], wire, pieces))
            if not messages[:, -1].any():
                read(messages[:, :-1], wire, pieces, kept, adds=True)
                self._age += 1
                return kept
        self._values, self._age = ranks.all_gather(shard), 0
        return self._values

    def again(self, shard: Tensor, ranks: Ranks) -> Tensor:
        """Return what the last `gathered` returned, or gather shards as they are if it was of other ranks."""
        kept = self._values
        return kept if kept is not None and kept.shape == (ranks.size, shard.numel()) else ranks.all_gather(shard)

    def _begin(self, name: str, ranks: Ranks) -> None:
        begins = "anew" if self._own is None else f"step {self._age} after an exact gather"
        way_out = "load the state of the same step on all; a rank cannot join later"
        agree(f"parameters of {name}: {begins}", ranks.group, "ranks would not gather alike", way_out)
        self._rank = ranks.rank
        if self._own is not None:
            self._values, self._own = ranks.all_gather(self._own.to(ranks.device)), None


def _message(shard: Tensor, kept: Tensor, wire: Wire, pieces: Sequence[Piece]) -> Tensor:
    """Return the message of a shard (bytes,) for ranks that have `kept` of it; its last byte says if it loses much."""
    values = numbers(shard, pieces, wire.block)
    difference = values - numbers(kept, pieces, wire.block)
    codes = wire.encode(difference)
    lost = (difference - wire.decode(codes)).square().sum(dtype=torch.float64)
    loses = ~(lost <= MOST_LOST * values.square().sum(dtype=torch.float64))  # also if it is NaN
    return torch.cat([codes, *rest(shard, pieces), loses.to(torch.uint8).view(1)])
