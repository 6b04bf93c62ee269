"""The body of a kernel while it is printed: its schedule, its loads and stores, and their addresses."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

from fxprec.ir.operators import Moves, moving_as
from fxprec.passes.analysis.joint import input_at, tensor_of
from fxprec.passes.lowering.triton import codecs
from fxprec.passes.lowering.triton.kernel import BLOCK, Argument, Unprintable
from fxprec.passes.lowering.triton.regions import Region, constant, is_reduction
from fxprec.passes.lowering.triton.sizes import (
    Size,
    aligned,
    coalesced,
    numel_of,
    product,
    shape_of,
    size_of,
    strides_of,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Value:
    """A variable of the kernel. ``extent``: which of the letters ``rc`` it varies over; flat variables have ``rc``."""

    name: str
    extent: frozenset[str]
    dtype: torch.dtype | None = torch.float32  # None: codes of a format, as int32


FULL = frozenset("rc")
LITERAL: frozenset[str] = frozenset()


class Body:
    """The lines of one kernel as they are added, and its parameters.

    An element is ``i`` in a flat kernel, and row ``r`` and column ``c`` in a kernel by rows.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self.lines: list[str] = []
        self.values: dict[Node, Value] = {}
        self.known: dict[str, Value] = {}  # by expression, so that nothing is computed twice
        self.numbers: dict[str, int] = {}
        self.inputs: dict[tuple[Node, torch.dtype], Argument] = {}
        self.helpers: dict[str, str] = {}
        self.sizes: dict[Size, str] = {}
        self.order = _memory_order(region)

    # -- schedule

    @property
    def columns(self) -> int | None:
        """Return the length of a row in elements; None for a flat region."""
        return self.region.columns

    @property
    def width(self) -> int:
        """Return the columns of a region that has rows."""
        assert self.columns is not None
        return self.columns

    @property
    def padded(self) -> int:
        """Return the length of a row rounded up to a power of two, as Triton's blocks have to be."""
        return 1 << (self.width - 1).bit_length()

    @property
    def per_program(self) -> int:
        """Return how many elements, or rows, one program computes."""
        return BLOCK if self.columns is None else max(1, 2048 // self.padded)

    @property
    def num_warps(self) -> int:
        """Return the warps, 16 elements a thread: at 32 a row of 4096 took 194 registers, which halved the threads."""
        tile = BLOCK if self.columns is None else self.per_program * self.padded
        return min(16, max(4, tile // 512))

    @property
    def block(self) -> str:
        """Return the shape of a program's values in Triton's syntax."""
        return f"[{BLOCK}]" if self.columns is None else f"[{self.per_program}, {self.padded}]"

    @property
    def count(self) -> tuple[str, Size]:
        """Name and size of what is divided among programs: elements or rows."""
        if self.columns is None:
            return "n", self.region.numel
        return "rows", _divided(self.region.numel, self.columns)

    @property
    def elements(self) -> str:
        """Return the expression for the number of elements of the whole region."""
        return "n" if self.columns is None else f"rows * {self.columns}"

    def head(self) -> list[str]:
        """Return the first lines of the kernel: indices, and the mask of those inside the tensors."""
        program = "tl.program_id(0)" + (".to(tl.int64)" if self._is_large() else "")
        if self.columns is None:
            return [f"i = {program} * {BLOCK} + tl.arange(0, {BLOCK})", "inside = i < n"]
        return [
            f"r = ({program} * {self.per_program} + tl.arange(0, {self.per_program}))[:, None]",
            f"c = tl.arange(0, {self.padded})[None, :]",
            f"inside = (r < rows) & (c < {self.columns})",
        ]

    def _is_large(self) -> bool:
        """Return whether an offset may need more than 31 bits."""
        counts = [self.region.numel, *(numel_of(a.node.meta["val"]) for a in self.inputs.values())]
        return not all(isinstance(c, int) and c < 1 << 31 for c in counts)

    # -- text

    def assign(self, base: str, expression: str, extent: frozenset[str], dtype: torch.dtype | None) -> Value:
        """Append a line that assigns an expression to a new name, or return the name of an equal expression."""
        found = self.known.get(expression)
        if found is None:
            number = self.numbers.get(base, 0)
            self.numbers[base] = number + 1
            found = self.known[expression] = Value(f"{base}_{number}", extent, dtype)
            self.lines.append(f"{found.name} = {expression}")
        return found

    def use(self, helper: str, source: str | None = None) -> str:
        """Add a helper function to the kernel's source; return its name."""
        if helper not in self.helpers:
            self.helpers[helper] = codecs.helper(helper) if source is None else source
        return helper

    def helper_order(self) -> list[str]:
        """Return the helpers' names, each after the helpers that it calls."""
        order = {name: i for i, name in enumerate(codecs.HELPERS)}
        return sorted(self.helpers, key=lambda h: (order.get(h, len(order)), h))

    def _size(self, size: Size) -> str:
        """Return an expression for a size: a literal, a parameter, or a product of them."""
        if isinstance(size, int | sympy.Integer):
            return str(int(size))
        if isinstance(size, sympy.Mul):
            return "(" + " * ".join(self._size(part) for part in size.args) + ")"
        return self.sizes.setdefault(size, f"k{len(self.sizes)}")

    def _offset(self, shape: Sequence[Size], strides: Sequence[Size], variable: str) -> str:
        """Return the offset of element ``variable`` (row-major in ``shape``) in memory with these strides."""
        inner: Size = 1
        terms: list[str] = []
        dims = coalesced(shape, strides)
        for k, (size, stride) in enumerate(reversed(dims)):
            index = variable if inner == 1 else f"{variable} // {self._size(inner)}"
            if k < len(dims) - 1:
                index += f" % {self._size(size)}"
            if stride != 0:
                terms.append(index if stride == 1 and index == variable else f"({index}) * {self._size(stride)}")
            inner = inner * size
        return " + ".join(terms)

    def _place(self, shape: Sequence[Size], strides: Sequence[Size], of_row: bool) -> tuple[str, frozenset[str]]:
        """Return the offset of a program's elements, and the letters over which the offset varies."""
        if self.columns is None or of_row:
            variable = "i" if self.columns is None else "r"
            if self.columns is None and self.order is not None:
                shape, strides = [shape[d] for d in self.order], [strides[d] for d in self.order]
            offset = self._offset(shape, strides, variable)
            return offset, frozenset("rc" if self.columns is None else "r") if offset else LITERAL
        of_lead = self._offset(shape[:-1], strides[:-1], "r")
        of_column = "" if strides[-1] == 0 else "c" if strides[-1] == 1 else f"c * {self._size(strides[-1])}"
        extent = ("r" if of_lead else "") + ("c" if of_column else "")
        return " + ".join(part for part in (of_lead, of_column) if part), frozenset(extent)

    def _mask(self, extent: frozenset[str]) -> str:
        if not extent:
            return ""
        if extent == FULL:
            return "inside"
        return "r < rows" if "r" in extent else f"c < {self.columns}"

    # -- reading and writing

    def read(self, source: Node, reader: Node, *, as_code: bool = False) -> Value:
        """Return ``source`` as ``reader`` sees it: a value of the region, a literal, or a load.

        Raises `Unprintable` if ``reader`` needs another shape than the tensor's own.
        """
        if source in self.values:
            return self.values[source]
        if (number := constant(source)) is not None:
            return Value(literal(number, source.meta["val"].dtype), LITERAL, source.meta["val"].dtype)
        val: torch.Tensor = source.meta["val"]
        of_row = reader in self.region.rows and not is_reduction(reader)
        wanted = shape_of(tensor_of(input_at(reader, 0) if is_reduction(reader) else reader))
        strides = aligned(shape_of(val), strides_of(val), wanted)
        if strides is None:
            raise Unprintable(f"{source.name} is read in another shape than its own")
        base, start = self._base(source)
        place, extent = self._place(wanted, strides, of_row)
        argument = self._argument(base, val, wanted, strides)
        at = " + ".join(part for part in (argument.name, self._size(start) if start != 0 else "", place) if part)
        mask = self._mask(extent)
        load = f"tl.load({at}, mask={mask}, other=0)" if mask else f"tl.load({at})"
        if as_code:
            return self.assign("code", load + _FROM_CODE.get(argument.dtype, ".to(tl.int32)"), extent, None)
        return self.assign("x", load + _FROM_MEMORY[argument.dtype], extent, val.dtype)

    def _base(self, node: Node) -> tuple[Node, Size]:
        """Return the tensor whose memory ``node`` views, and the offset in it at which ``node`` begins."""
        val = node.meta["val"]
        base = node
        while base.target in _MEMORY_VIEWS and _same_memory(base, base.all_input_nodes[0]):
            base = base.all_input_nodes[0]
        return base, size_of(val.storage_offset()) - size_of(base.meta["val"].storage_offset())

    def _argument(self, base: Node, val: torch.Tensor, shape: Sequence[Size], strides: Sequence[Size]) -> Argument:
        dtype = torch.uint8 if val.dtype.itemsize == 1 and val.dtype.is_floating_point else val.dtype
        found = self.inputs.get((base, dtype))
        if found is None:
            touched = product([s for s, stride in zip(shape, strides, strict=True) if stride != 0])
            found = self.inputs[base, dtype] = Argument(f"in{len(self.inputs)}", base, dtype, touched)
        return found

    def store(self, node: Node, i: int) -> Argument:
        """Append the store of a node's value to output ``i``; return the kernel's parameter for it."""
        val: torch.Tensor = node.meta["val"]
        value, of_row = self.values[node], node in self.region.rows
        if of_row:
            place, letters, mask = self._offset(shape_of(val), strides_of(val), "r"), "r", "r < rows"
        else:
            place, _ = self._place(shape_of(val), strides_of(val), False)
            letters, mask = "i" if self.columns is None else "rc", "inside"
        # Addresses must be a block of the values' shape, also along a dimension of one element.
        missing = [f"0 * {x}" for x in letters if re.search(rf"\b{x}\b", place) is None]
        place = " + ".join(filter(None, (place, *missing)))
        dtype = torch.uint8 if val.dtype.itemsize == 1 and val.dtype.is_floating_point else val.dtype
        cast = (_TO_CODE if value.dtype is None else _TO_MEMORY)[dtype]
        what = value.name if of_row else self.whole(value)
        self.lines.append(f"tl.store(out{i} + {place}, {what}{cast}, mask={mask})")
        return Argument(f"out{i}", node, dtype, numel_of(val))

    def whole(self, value: Value) -> str:
        """Return ``value`` broadcast to all elements of the program."""
        if value.extent == FULL:
            return value.name
        if not value.extent and not value.name.isidentifier():
            return f"tl.full({self.block}, {value.name}, tl.float32)"
        return f"tl.broadcast_to({value.name}, {self.block})"


_FROM_MEMORY = {
    torch.float32: "",
    torch.bfloat16: ".to(tl.float32)",
    torch.float16: ".to(tl.float32)",
    torch.bool: " != 0",
}
_TO_MEMORY = {
    torch.float32: "",
    torch.bfloat16: ".to(tl.bfloat16)",
    torch.float16: ".to(tl.float16)",
    torch.bool: "",
}
_FROM_CODE = {
    torch.uint32: ".to(tl.int32, bitcast=True)",
    torch.bfloat16: ".to(tl.int16, bitcast=True).to(tl.int32)",
    torch.float16: ".to(tl.int16, bitcast=True).to(tl.int32)",
}
_TO_CODE = {
    torch.uint8: ".to(tl.uint8)",
    torch.uint16: ".to(tl.uint16)",
    torch.uint32: ".to(tl.uint32, bitcast=True)",
    torch.bfloat16: ".to(tl.int16).to(tl.bfloat16, bitcast=True)",
    torch.float16: ".to(tl.int16).to(tl.float16, bitcast=True)",
}
_MEMORY_VIEWS = moving_as(Moves.ORDER, Moves.SPREAD, Moves.RANK, Moves.SHAPE, Moves.PART, Moves.ALIAS)


def _memory_order(region: Region) -> list[int] | None:
    """Return the dimensions of a flat region from the slowest to the fastest in memory; None for row-major.

    All values of the region must have one shape. The order is that of most values, for instance channels-last.
    """
    if region.columns is not None:
        return None
    vals = [n.meta["val"] for n in region.nodes]
    if len({shape_of(val) for val in vals}) != 1:
        return None
    layouts = Counter(strides_of(val) for val in vals)
    (strides, _), *_ = layouts.most_common(1)
    if not all(isinstance(s, int) for s in strides):
        return None
    order = sorted(range(len(strides)), key=lambda d: -strides[d])
    return None if order == sorted(order) else order


def _same_memory(view: Node, source: Node) -> bool:
    a, b = view.meta["val"], source.meta["val"]
    return isinstance(b, torch.Tensor) and a.dtype == b.dtype


def literal(number: float, dtype: torch.dtype) -> str:
    """Return a number as Triton source; inf and NaN have no literals."""
    if dtype == torch.bool:
        return str(bool(number))
    value = float(number)
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def _divided(size: Size, by: int) -> Size:
    found = size // by if isinstance(size, int) else sympy.simplify(size / by)
    return int(found) if isinstance(found, sympy.Integer) else found
