"""Lay tensors side by side in one flat tensor, without a copy if they already lie so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxprec.runtime.aps.layout import Layout, layout, sizes_of


def write_back(layers: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Copy layers (elements,) into their views."""
    for layer, view in zip(layers, views, strict=True):
        view.copy_(layer.view_as(view))


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
        write_back(self.layout.layers(values), self.views)

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
