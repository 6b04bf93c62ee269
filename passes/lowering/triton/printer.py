"""Print the source of a region's kernel: loads, float32 arithmetic, casts, statistics, stores."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fxprec.ir.symbolic import Dequantize, KeepCodes, KeepNonfinite, Quantize, Rescale
from fxprec.numerics import device
from fxprec.numerics.formats import Format, kept_codes, parse
from fxprec.numerics.stats import SITE_COUNTERS
from fxprec.passes.analysis.joint import item_of
from fxprec.passes.lowering.expand import KEPT_CODES
from fxprec.passes.lowering.triton import codecs
from fxprec.passes.lowering.triton.body import FULL, LITERAL, Body, Value, literal
from fxprec.passes.lowering.triton.kernel import Kernel, Unprintable
from fxprec.passes.lowering.triton.regions import VAR_MEAN, Region, is_constant, is_view, outputs, shows_codes
from fxprec.passes.lowering.triton.table import EXPRESSIONS, INEXACT, OF_BOOLS, POWERS, REDUCTIONS, name_of

aten = torch.ops.aten
_UNROUNDED = frozenset({"clone", "where", "neg", "abs", "relu", "maximum", "minimum", "amax", "amin"})
_NAMED = 3  # number of operators in a kernel's name


@dataclass(frozen=True)
class Tables:
    """Rows of the scale table that are scaled, and rows that a kernel counts statistics for."""

    scaled: Collection[int]
    watched: Collection[int]


def print_kernel(region: Region, tables: Tables) -> Kernel:
    """Return the kernel of ``region``. Raises `Unprintable`."""
    return _Printer(region, tables).run()


class _Printer(Body):
    def __init__(self, region: Region, tables: Tables) -> None:
        super().__init__(region)
        self.tables = tables
        self.pairs: dict[Node, tuple[Value, Value]] = {}  # of var_mean
        self.rows: dict[int, str] = {}
        self.watched: list[int] = []
        self.formats: dict[str, None] = {}
        self.is_exact = True

    def run(self) -> Kernel:
        if isinstance(self.region.numel, int) and self.region.numel >= 1 << 31:
            raise Unprintable("it has 2^31 elements or more, which its counters do not hold")
        for node in self.region.nodes:
            self._node(node)
        written = [self.store(node, i) for i, node in enumerate(outputs(self.region))]
        sites = {cast.row for _, cast in Quantize.among(self.region.nodes)}
        kernel = Kernel(
            region=self.region,
            name="",
            source="",
            inputs=tuple(self.inputs.values()),
            outputs=tuple(written),
            sizes=(self.count, *((name, size) for size, name in self.sizes.items())),
            rows=tuple(self.rows),
            sites=tuple(sorted(sites)),
            watched=tuple(self.watched),
            per_program=self.per_program,
            num_warps=self.num_warps,
            is_exact=self.is_exact,
            formats=tuple(self.formats),
        )
        return self._named(kernel, [*self.head(), *self.lines])

    def _named(self, kernel: Kernel, lines: list[str]) -> Kernel:
        """Return ``kernel`` with its source and a name that no other source has."""
        head = _PREAMBLE + "".join(f"\n\n{self.helpers[name]}" for name in self.helper_order()) + "\n\n"
        if self.num_warps != 4:
            head += f"@triton.autotune(configs=[triton.Config({{}}, num_warps={self.num_warps})], key=[])\n"
        parameters = ", ".join(name for name, _ in kernel.parameters)
        body = f"({parameters}):\n" + "".join(f"    {line}\n" for line in lines)
        name = f"{self._name()}_{hashlib.sha256((head + body).encode()).hexdigest()[:6]}"
        return replace(kernel, name=name, source=f"{head}@triton.jit\ndef {name}{body}")

    def _name(self) -> str:
        ops = [name_of(n.target) for n in self.region.nodes if not is_view(n) and n.target is not operator.getitem]
        shown = list(dict.fromkeys(o for o in ops if o != "dequantize")) or ["dequantize"]
        kind = "flat" if self.columns is None else "rows"
        return "_".join(["fxprec", kind, *shown[-_NAMED:]])

    def _codec(self, pair: tuple[str, str], fmt: str) -> str:
        self.formats[fmt] = None
        return self.use(*pair)

    def _node(self, node: Node) -> None:
        if node.target is VAR_MEAN:
            self.pairs[node] = self._var_mean(node)
        elif (item := item_of(node)) is not None:
            self.values[node] = self.pairs[item[0]][item[1]]
        else:
            self.values[node] = self._value(node)

    def _value(self, node: Node) -> Value:
        if shows_codes(node):
            return self.read(node.all_input_nodes[0], node, as_code=True)
        special = _SPECIAL.get(node.target)
        if special is not None:
            return special(self, node)
        if is_view(node):
            source = node.all_input_nodes[0]
            return self.read(source if source in self.values or is_constant(source) else node, node)
        if node.target in REDUCTIONS:
            return self._reduction(node)
        return self._pointwise(node)

    def _pointwise(self, node: Node) -> Value:
        target, name = str(node.target), name_of(node.target)
        read = [self.read(a, node) if isinstance(a, Node) else a for a in node.args if not isinstance(a, torch.dtype)]
        values = [v for v in read if isinstance(v, Value)]
        dtype: torch.dtype = node.meta["val"].dtype
        all_bool = all(v.dtype == torch.bool for v in values)
        expression = OF_BOOLS.get(target, EXPRESSIONS.get(target, "")) if all_bool else EXPRESSIONS.get(target, "")
        if node.target is aten.pow.Tensor_Scalar:
            expression, read = POWERS[node.args[1]], read[:1]
        alpha: Any = node.kwargs.get("alpha", 1)
        if alpha != 1:
            expression = expression.replace("{1}", f"product({{1}}, {float(alpha)!r})")
        texts = [self._operand(v, name, all_bool) for v in read]
        result = expression.format(*texts)
        for helper in ("tanh", "product"):
            if f"{helper}(" in result:
                self.use(helper)
        self.is_exact &= name not in INEXACT
        if target == "prims.convert_element_type.default" and all_bool and dtype != torch.bool:
            result = f"tl.where({result}, 1.0, 0.0)"
        elif target == "prims.convert_element_type.default" and dtype == torch.bool and not all_bool:
            result = f"{result} != 0"
        extent = frozenset().union(*(v.extent for v in values)) if values else LITERAL
        if not values:
            raise Unprintable(f"{node.name} reads no tensor")
        return self._rounded(name, result, extent, dtype, skip=name in _UNROUNDED)

    def _operand(self, value: object, name: str, all_bool: bool) -> str:
        if isinstance(value, Value):
            as_number = value.dtype == torch.bool and not all_bool and name != "where"
            return f"tl.where({value.name}, 1.0, 0.0)" if as_number else value.name
        assert isinstance(value, int | float)
        return literal(value, torch.bool if all_bool else torch.float32)

    def _rounded(
        self, name: str, expression: str, extent: frozenset[str], dtype: torch.dtype, *, skip: bool = False
    ) -> Value:
        """Assign an expression in float32, rounded if the graph's dtype is narrower."""
        if expression.isidentifier() and (skip or dtype in (torch.float32, torch.bool)):
            return Value(expression, extent, dtype)
        if dtype in _ROUNDING and not skip:
            expression = f"{self.use(_ROUNDING[dtype])}({expression})"
        return self.assign(name, expression, extent, dtype)

    def _reduction(self, node: Node) -> Value:
        name, x = name_of(node.target), self.read(node.all_input_nodes[0], node)
        whole = self.whole(x)
        dtype: torch.dtype = node.meta["val"].dtype
        if name == "any":
            return self.assign(name, f"{self.use('row_any')}({whole}, inside)", frozenset("r"), torch.bool)
        if name in ("amax", "amin"):
            sign = "-" if name == "amin" else ""
            expression = f"{sign}{self.use('row_max')}({sign}{whole}, inside)"
            return self._rounded(name, expression, frozenset("r"), dtype, skip=True)
        self.is_exact = False
        expression = self._sum(whole) if name == "sum" else self._mean(whole, self.width)
        return self._rounded(name, expression, frozenset("r"), dtype)

    def _sum(self, text: str) -> str:
        return f"{self.use('row_sum')}({text}, inside)"

    def _mean(self, text: str, count: float) -> str:
        return f"tl.div_rn({self._sum(text)}, {float(count)!r})"

    def _var_mean(self, node: Node) -> tuple[Value, Value]:
        x = self.whole(self.read(node.all_input_nodes[0], node))
        self.is_exact = False
        correction = node.kwargs.get("correction", 1)
        correction = 1 if correction is None else correction
        assert isinstance(correction, int | float)
        mean = self.assign("mean", self._mean(x, self.width), frozenset("r"), torch.float32)
        off = self.assign("centred", f"{x} - {mean.name}", FULL, torch.float32)
        count = max(self.width - correction, 0)
        var = self.assign("var", self._mean(f"{off.name} * {off.name}", count), frozenset("r"), torch.float32)
        return var, mean

    def _entry(self, row: int) -> str:
        """Return a pointer to a row of the scale table."""
        name = self.rows.setdefault(row, f"row{len(self.rows)}")
        return f"table + ({name} // 2 - 1) * {codecs.ROW}"

    def _power(self, row: int, sign: str = "") -> str:
        expression = f"{self.use('power')}({sign}tl.load({self._entry(row)}))"
        return self.assign("scale", expression, LITERAL, torch.float32).name

    def _quantize(self, node: Node) -> Value:
        cast = Quantize.of(node)
        row, fmt = cast.row, cast.format
        value = self.read(cast.x, node)
        stored = value
        if row in self.tables.scaled:
            stored = self.assign("scaled", f"{value.name} * {self._power(row)}", value.extent, torch.float32)
        if row in self.tables.watched and row not in self.watched:
            self._statistics(value, stored, row, fmt, simulated=cast.is_simulated)
        if cast.is_simulated:
            self.formats[fmt] = None
            rounded = f"{self.use('round_by_table')}({self.whole(stored)}, {self._entry(row)})"
            return self.assign("rounded", rounded, FULL, torch.float32)
        encode = self._codec(device.encoder_source(parse(fmt)), fmt)
        return self.assign("code", f"{encode}({self.whole(stored)})", FULL, None)

    def _statistics(self, x: Value, stored: Value, row: int, fmt: str, *, simulated: bool) -> None:
        self.use("count", codecs.COUNT)
        entry = self._entry(row)
        scaled = row in self.tables.scaled
        over, under = codecs.thresholds(fmt)
        if simulated:
            over, under = (text.format(f"({entry})") for text in codecs.TABLE_THRESHOLDS)
        counters = f"counters + (slot // 2 - 1 + {len(self.watched)}) * {SITE_COUNTERS}"
        self.lines.append(
            f"count({self.whole(x)}, {self.whole(stored)}, inside, {entry}, {counters}, {self.elements}, "
            f"{over}, {under}, {scaled})"
        )
        self.watched.append(row)

    def _dequantize(self, node: Node) -> Value:
        cast = Dequantize.of(node)
        value = self.read(cast.q, node, as_code=not cast.is_simulated)
        name = value.name
        if not cast.is_simulated:
            decode = self._codec(device.decoder_source(parse(cast.format)), cast.format)
            name = self.assign("number", f"{decode}({name})", value.extent, torch.float32).name
        if cast.row in self.tables.scaled and not cast.is_as_stored:
            name = f"{name} * {self._power(cast.row, '-')}"
        return self._rounded("value", name, value.extent, cast.dtype)

    def _rescale(self, node: Node) -> Value:
        rescale = Rescale.of(node)
        value = self.read(rescale.g, node)
        expression = f"{value.name} * {self._power(rescale.row)}"
        return self._rounded("rescaled", expression, value.extent, node.meta["val"].dtype)

    def _keep_codes(self, node: Node) -> Value:
        kept = KeepCodes.of(node)
        return self._with_specials(node, kept.rounded, kept.x, parse(kept.format))

    def _with_specials(self, node: Node, codes: Node, x: Node, fmt: Format) -> Value:
        code, wide = self.read(codes, node, as_code=True), self.read(x, node)
        inf, nan, sign = kept_codes(fmt)
        expression = f"{self.use('keep_codes')}({code.name}, {self.whole(wide)}, {inf}, {nan}, {sign})"
        return self.assign("code", expression, FULL, None)

    def _keep_nonfinite(self, node: Node) -> Value:
        kept = KeepNonfinite.of(node)
        if node.meta["val"].dtype in KEPT_CODES:
            return self._with_specials(node, kept.rounded, kept.x, KEPT_CODES[node.meta["val"].dtype])
        rounded, x = self.read(kept.rounded, node), self.read(kept.x, node)
        other = self._rounded("wide", x.name, x.extent, node.meta["val"].dtype)
        wide = x.name if x.name.isidentifier() else self.whole(x)  # a constant is a number, which has no bits
        expression = f"tl.where({self.use('is_finite')}({wide}), {rounded.name}, {other.name})"
        return self.assign("kept", expression, rounded.extent | x.extent, node.meta["val"].dtype)


_SPECIAL: dict[object, Callable[[_Printer, Node], Value]] = {
    Quantize.target: _Printer._quantize,
    Dequantize.target: _Printer._dequantize,
    Rescale.target: _Printer._rescale,
    KeepCodes.target: _Printer._keep_codes,
    KeepNonfinite.target: _Printer._keep_nonfinite,
}
_ROUNDING = {torch.bfloat16: "as_bfloat16", torch.float16: "as_float16"}
_PREAMBLE = """import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""
