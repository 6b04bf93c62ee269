"""What tensors take in memory while they are saved for backward."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from fxprec.formats import Format
from fxprec.passes.tensors import CountedTensor
from fxprec.recipes import Recipe


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes saved for backward by tensor id, held high and held low. Tensors not listed are not saved."""

    high: Mapping[int, int]
    low: Mapping[int, int]
    fixed: int = 0
    """Bytes saved whatever is chosen (masks, indices, statistics)."""

    @classmethod
    def predict(cls, tensors: Sequence[CountedTensor], recipe: Recipe) -> Self:
        """Predict from the tensors marked ``saved``: elements times the bytes of their format."""
        saved = [t for t in tensors if t.saved]
        high = {t.id: t.elements * bytes_per_element(recipe.format_of(t.kind, low=False)) for t in saved}
        low = {t.id: t.elements * bytes_per_element(recipe.format_of(t.kind, low=True)) for t in saved}
        return cls(high, low)

    def gain(self, tensor: int) -> int:
        """Return the bytes that demoting a tensor frees."""
        return self.high.get(tensor, 0) - self.low.get(tensor, 0)

    def total(self, low: Collection[int]) -> int:
        """Return all bytes saved when the tensors in ``low`` are low."""
        return self.fixed + sum(self.low[i] if i in low else size for i, size in self.high.items())


def bytes_per_element(fmt: Format) -> int:
    """Return the bytes of one stored code: formats are held in 1, 2 or 4 bytes."""
    return 1 if fmt.bits <= 8 else 2 if fmt.bits <= 16 else 4


def bytes_in_float32(tensors: Sequence[CountedTensor]) -> int:
    """Return the bytes of the tensors marked ``saved``, in float32."""
    return sum(4 * t.elements for t in tensors if t.saved)


def readable(size: int) -> str:
    """Return ``"1.50 GiB (1610612736 bytes)"``."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.2f} {unit} ({size} bytes)"
    return f"{size} bytes"
