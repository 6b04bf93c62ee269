"""A generated kernel: its source and the arguments of its launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from fxprec.passes.analysis.marks import marks
from fxprec.passes.lowering.triton.regions import Region
from fxprec.passes.lowering.triton.sizes import Size

BLOCK = 1024
"""Number of elements per program of a flat kernel: 8 per thread."""


class Unprintable(Exception):
    """Raised if the generator cannot print a region. The message says why; Inductor then keeps the region."""


@dataclass(frozen=True)
class Argument:
    """A tensor parameter of a kernel."""

    name: str
    node: Node
    dtype: torch.dtype
    """Dtype in the kernel: 8-bit floats are read and written as uint8."""
    elements: Size
    """Number of different elements that the kernel accesses."""

    @property
    def pointer(self) -> str:
        """Return Triton's pointer type of the tensor."""
        return POINTERS[self.dtype]

    @property
    def origin(self) -> str:
        """Return the node's name in the graph before lowering."""
        return marks(self.node).origin or self.node.name


POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.uint32: "*u32",
    torch.int32: "*i32",
}


@dataclass(frozen=True)
class Kernel:
    """One region as canonical source: equal regions have equal sources."""

    region: Region
    name: str
    source: str
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    sizes: tuple[tuple[str, Size], ...]
    """Integer parameters that are sizes: name and size."""
    rows: tuple[int, ...]
    """Rows of the scale table: the integer parameters ``row0``, ``row1``, ..."""
    sites: tuple[int, ...]
    """Rows of the casts that the kernel stores: sites of the plan, and further casts of these sites."""
    watched: tuple[int, ...]
    """Rows for which the kernel counts statistics, in the order of their counters."""
    per_program: int
    """Elements (flat) or rows (by rows) per program."""
    num_warps: int
    is_exact: bool
    """Whether the kernel gives the bits of the reference: it has only + - * / and casts, and no sum over a row."""
    formats: tuple[str, ...]

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """Name and Triton type of every parameter, in order."""
        pointers = [(a.name, a.pointer) for a in self.inputs]
        pointers += [("table", "*i32")] if self.rows else []
        pointers += [("counters", "*i32")] if self.watched else []
        pointers += [(a.name, a.pointer) for a in self.outputs]
        integers = [name for name, _ in self.sizes] + [f"row{i}" for i in range(len(self.rows))]
        integers += ["slot"] if self.watched else []
        return pointers + [(name, "i32") for name in integers]

    @property
    def bytes_moved(self) -> Size:
        """Return the bytes that a launch reads and writes."""
        return sum(a.elements * a.dtype.itemsize for a in (*self.inputs, *self.outputs))

    def to_dict(self) -> dict[str, object]:
        """Return the data that compiling and launching needs, as JSON. ``bytes`` is a string if sizes are dynamic."""
        moved = self.bytes_moved
        return {
            "name": self.name,
            "parameters": [list(p) for p in self.parameters],
            "num_warps": self.num_warps,
            "formats": list(self.formats),
            "bytes": moved if isinstance(moved, int) else str(moved),
            "exact": self.is_exact,
        }
