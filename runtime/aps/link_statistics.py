"""Take the statistics of one step's gradients from which a link plan is chosen, and reduce them over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fxprec.runtime.aps.groups import Groups, agree, communication_device
from fxprec.runtime.aps.link_plan import LayerBits
from fxprec.runtime.aps.link_problem import Layer
from fxprec.runtime.aps.low_rank import Memory, columns_of, errors_of


@dataclass
class Seen:
    """The statistics of a layer on this rank."""

    bucket: int
    elements: int
    squares: Tensor
    """float64 (): squared norm; not finite if an element is not."""
    amax: Tensor
    columns: int
    missed: float = 0.0
    """As in `Layer`, over all ranks."""


class Statistics:
    """Statistics of one step; `weights` are the weights of layers' errors, by name."""

    def __init__(self, groups: Groups, low_rank: int, memory: Memory, weights: Mapping[str, float]) -> None:
        self._groups = groups
        self._rank = low_rank
        self._memory = memory
        self._weights = weights
        self.clear()

    def clear(self) -> None:
        """Drop the statistics of the step."""
        self._seen: dict[str, Seen] = {}
        self._products = 0

    def note(self, bucket: int, layers: Mapping[str, tuple[Tensor, Tensor]], rows: Mapping[str, LayerBits]) -> None:
        """Take the statistics of a bucket's layers, (parameter, gradient) by name; `rows` says how they are sent."""
        for name, (parameter, view) in layers.items():
            values = view.detach()
            squares = torch.linalg.vector_norm(values, dtype=torch.float64) ** 2
            amax = torch.linalg.vector_norm(values, float("inf"), dtype=torch.float64)
            columns = columns_of(parameter, self._rank)
            self._seen[name] = Seen(bucket, parameter.numel(), squares, amax, columns)
        for in_force in (True, False):
            chosen = [n for n in layers if self._seen[n].columns and (n in rows and rows[n].low_rank > 0) == in_force]
            if chosen:
                pairs = [(layers[n][0], layers[n][1].detach()) for n in chosen]
                errors, products = errors_of(pairs, self._rank, self._memory, self._groups.exponents, in_force=in_force)
                self._products += products
                for name, missed in zip(chosen, errors.tolist(), strict=True):
                    self._seen[name].missed = missed

    def layers(self) -> tuple[Layer, ...] | None:
        """Return the layers with their statistics over all ranks, or None if one is not finite.

        Raises `ConfigError` on all ranks if their matrix products differ in bits.
        """
        group = self._groups.exponents
        if any(seen.columns for seen in self._seen.values()):
            agree(
                f"products {self._products & 2**64 - 1:x}",
                group,
                f"low_rank={self._rank}: ranks multiply to different bits, and replicas would diverge",
                "give all ranks the same processor and number of threads, or leave low_rank out",
            )
        names, device = list(self._seen), communication_device(group)
        squares = torch.stack([self._seen[n].squares for n in names]).to(device)
        amax = torch.stack([self._seen[n].amax for n in names]).to(device)
        dist.all_reduce(squares, group=group)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        if not bool((squares + amax).isfinite().all()):
            return None
        means, largest = (squares / self._groups.size).tolist(), amax.tolist()
        return tuple(
            Layer(n, s.bucket, s.elements, means[k], largest[k], self._weights.get(n, 1.0), s.columns, s.missed)
            for k, (n, s) in enumerate(self._seen.items())
        )
