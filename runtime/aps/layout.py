"""Cut a flat bucket of layers into one chunk per rank; a piece is the part of one layer within one chunk.

A bucket whose layers already lie side by side is taken as it is, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Elements start..end of the bucket: the part of one layer that one rank owns."""

    start: int
    end: int
    layer: int
    owner: int


@dataclass(frozen=True)
class Layout:
    """A bucket of layers of `sizes` elements, divided over `num_ranks` in equal chunks, the last one padded.

    Layers begin, and chunks are cut, at multiples of `block` elements. The gap after a layer is padding.
    """

    sizes: tuple[int, ...]
    num_ranks: int
    block: int = 1

    @cached_property
    def total(self) -> int:
        """Return the elements of the bucket, padding between layers included."""
        return sum(self.spans)

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """Return the elements of each layer with its padding."""
        return tuple(-(-n // self.block) * self.block for n in self.sizes)

    @cached_property
    def chunk(self) -> int:
        """Return the elements of one rank's chunk, padding included."""
        return -(-self.total // (self.num_ranks * self.block)) * self.block

    @cached_property
    def padded(self) -> int:
        """Return the elements of all chunks."""
        return self.chunk * self.num_ranks

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Return all non-empty pieces in order."""
        found, start = [], 0
        for layer, span in enumerate(self.spans):
            end = start + span
            while start < end:
                owner = start // self.chunk
                stop = min(end, (owner + 1) * self.chunk)
                found.append(Piece(start, stop, layer, owner))
                start = stop
        return tuple(found)

    @cached_property
    def layer_of(self) -> tuple[int, ...]:
        """Return the layer of each piece."""
        return tuple(p.layer for p in self.pieces)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Return (start, end) of each layer with its padding."""
        return bounds_of(self.spans)

    @cached_property
    def max_pieces(self) -> int:
        """Return the largest number of pieces that a rank owns."""
        return max((len(self.owned(r)) for r in range(self.num_ranks)), default=0)

    def owned(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces of one rank's chunk, in order."""
        return tuple(p for p in self.pieces if p.owner == rank)

    def layers(self, flat: Tensor) -> list[Tensor]:
        """Return views of each layer, without its padding, in a flat tensor of at least `total` elements."""
        whole = torch.split(flat[: self.total], list(self.spans))
        return [v if v.numel() == n else v[:n] for v, n in zip(whole, self.sizes, strict=True)]


@lru_cache(maxsize=1024)
def bounds_of(sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return (start, end) of tensors of these sizes that lie one after another."""
    ends = list(accumulate(sizes))
    return tuple(zip([0, *ends[:-1]], ends, strict=True)) if ends else ()


@lru_cache(maxsize=1024)
def layout(sizes: tuple[int, ...], num_ranks: int, block: int = 1) -> Layout:
    """Return the layout of these layer sizes, computed once."""
    return Layout(sizes, num_ranks, block)


def sizes_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the element counts of tensors."""
    return tuple(t.numel() for t in tensors)


class Flat:
    """Tensors of one dtype side by side, each padded with zeros to whole blocks; `write` copies values back.

    Tensors are converted to `dtype`; None keeps theirs.
    """

    def __init__(
        self, views: Sequence[Tensor], num_ranks: int, block: int = 1, dtype: torch.dtype | None = torch.float32
    ) -> None:
        self.views = views
        self.layout: Layout = layout(sizes_of(views), num_ranks, block)
        self.in_place = False
        self.values = (
            self._laid_out(dtype or views[0].dtype) if views else torch.empty(0, dtype=torch.float32, device="cpu")
        )

    def write(self, values: Tensor) -> None:
        """Copy flat values back into the tensors, unless they are there already."""
        if self.in_place and values.data_ptr() == self.values.data_ptr():
            return
        for layer, view in zip(self.layout.layers(values), self.views, strict=True):
            view.copy_(layer.view_as(view))

    def _laid_out(self, dtype: torch.dtype) -> Tensor:
        views, lay = self.views, self.layout
        first = views[0].storage_offset()
        expected = [first + start for start, _ in lay.bounds]
        plain = all(v.dtype == dtype and v.dim() == 1 and v.is_contiguous() for v in views)
        self.in_place = plain and lay.spans == lay.sizes and [v.storage_offset() for v in views] == expected
        if self.in_place:
            return views[0].as_strided((lay.total,), (1,))
        layers = [v.reshape(-1).to(dtype) for v in views]
        if lay.spans != lay.sizes:
            gaps = zip(layers, lay.spans, strict=True)
            layers = [part for v, span in gaps for part in (v, v.new_zeros(span - v.numel()))]
        return torch.cat(layers)
