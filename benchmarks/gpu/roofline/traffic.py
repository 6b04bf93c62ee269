"""Bytes that one of Inductor's Triton kernels moves, read from its text.

Each pointer counts once a kernel, however often its loop comes by: what a second pass reads is taken to be in a cache.
Where a kernel touches less than the whole of a buffer, as one half of a pair that lies side by side, it counts as many
elements as the kernel has, for each place it reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KernelText:
    """What a kernel's source says of its memory."""

    pointers: tuple[str, ...]
    """Parameters (``in_ptr0``, ``in_out_ptr0``, ``out_ptr0``) in order; sizes come behind them."""
    places: dict[str, tuple[frozenset[str], frozenset[str]]]
    """Of each pointer the distinct index expressions that are loaded, and stored."""
    sizes: tuple[str, ...] = ()
    """Names of the sizes that a launch gives, in order: ``xnumel``, ``r0_numel``."""

    @classmethod
    def parse(cls, source: str) -> KernelText:
        """Read the source of ``async_compile.triton``."""
        (signature,) = re.findall(r"^def triton_\w+\((.*?)\):$", source, re.MULTILINE)
        parameters = tuple(name.split(":")[0].strip() for name in signature.split(","))
        pointers = tuple(p for p in parameters if "_ptr" in p)
        sizes = tuple(p for p in parameters if p.endswith("numel"))
        return cls(pointers, {p: (_places(source, p, "load"), _places(source, p, "store")) for p in pointers}, sizes)

    def traffic(self, elements: Sequence[int], item_bytes: Sequence[int], extent: int) -> tuple[int, int]:
        """Return bytes read and written by a launch of ``extent`` elements, given what its pointers hold."""
        read = written = 0
        for pointer, held, item in zip(self.pointers, elements, item_bytes, strict=True):
            loaded, stored = (min(held, extent * len(places)) * item for places in self.places[pointer])
            read, written = read + loaded, written + stored
        return read, written


def _places(source: str, pointer: str, access: str) -> frozenset[str]:
    start = f"tl.{access}({pointer} + ("
    return frozenset(_closed(rest) for rest in source.split(start)[1:])


def _closed(text: str) -> str:
    """Return ``text`` up to the parenthesis that closes the one before it."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[:i]
    raise AssertionError(f"no end to {text[:60]!r}")
