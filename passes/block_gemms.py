"""Round the operands of GEMMs with a parameter to block formats, along the dimension that each product sums over.

A layer has three products: its result, its input's gradient and its weight's gradient. Each has a format of its own in
the recipe (`fxprec.config.operands`). An operand is stored in blocks and read back in front of its GEMM. So the GEMM
multiplies the same values as hardware with block-scaled GEMMs. Definitions: docs/compute.md, "Operands in blocks".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Node

from fxprec.config.operands import PRODUCTS, Operands, Product
from fxprec.ir.grouped import GroupedMm
from fxprec.ir.operators import Trait, having
from fxprec.ir.symbolic import DEQUANTIZE, KEEP_NONFINITE, QUANTIZE, RESCALE
from fxprec.numerics.blocks import BlockFormat, find_blocks
from fxprec.numerics.hadamard import SIZE
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.float32_functions import float32_function
from fxprec.passes.analysis.joint import input_at, is_backward, is_view, numel_hint, tensor_of
from fxprec.passes.analysis.marks import marks
from fxprec.passes.analysis.operators import Operator
from fxprec.passes.analysis.selection import covers
from fxprec.passes.base import OperandFormats, Pass, Work
from fxprec.passes.casts.grouped import GroupedOperands
from fxprec.passes.casts.operands import OperandCasts, Rounding
from fxprec.passes.notice import Notice
from fxprec.plan import Gemm
from fxprec.plan.lines import named

_MULTIPLYING = having(Trait.GEMM) & having(Trait.GEMM_BACKWARD)  # products with a vector (mv, dot) are among them
_SHOWING = frozenset({QUANTIZE, DEQUANTIZE, KEEP_NONFINITE, RESCALE}) | ops.CASTS

TWO_VALUES = "it multiplies two values, and no parameter"
KEPT_HIGH = "as keep_high asks"


@dataclass(frozen=True)
class BlockGemms(Pass):
    """Fill ``work.operand_formats``, one entry per GEMM of the plan, and insert the casts of their operands."""

    name: str = "block-gemms"

    def apply(self, work: Work) -> None:
        operands = work.settings.recipe.operands
        if operands is None:
            _notice_given(work)
            return
        rewrite = _Rewrite.of(work, operands)
        work.operand_formats = tuple(rewrite.chosen(i, op) for i, op in enumerate(work.grouped.gemms))
        rewrite.run()
        if work.given is None and not any(found.formats or found.is_kept_high for found in work.operand_formats):
            _notice_none(work)
        work.remarks.append(_remark(work, operands))


def _notice_given(work: Work) -> None:
    """Add a notice if the given plan rounds operands to blocks and the recipe does not."""
    given = () if work.given is None else [gemm for gemm in work.given.gemms if any(_formats(gemm))]
    if given:
        detail = (
            f"the given plan rounds the operands of {len(given)} GEMMs to blocks, and recipe "
            f"{work.settings.recipe.name!r} rounds none; give the recipe that the plan was made with"
        )
        work.notices.append(Notice("block-gemms", detail))


def _notice_none(work: Work) -> None:
    """Add a notice that no GEMM's operands are rounded although the recipe has formats for them."""
    for found in work.operand_formats[:1]:
        detail = f"recipe {work.settings.recipe.name!r} rounds no GEMM's operands here; the first GEMM: {found.why}"
        work.notices.append(Notice("block-gemms", detail))


def _formats(gemm: Gemm) -> tuple[str, ...]:
    return gemm.forward, gemm.input_grad, gemm.weight_grad


def _remark(work: Work, operands: Operands) -> str:
    rounded = sum(bool(found.formats) for found in work.operand_formats)
    names = ", ".join(f"{name} {fmt.name}" for name in PRODUCTS if (fmt := getattr(operands, name)) is not None)
    extras = [
        "weights in squares" if operands.square_weights else "",
        "gradients rounded at random" if operands.stochastic else "",
        "weight gradients through a random Hadamard matrix" if operands.hadamard else "",
        f"to step {operands.high_after}" if operands.high_after else "",
        f"operands of gradients' products rotated {operands.eden} elements at a time, with scales by MS-EDEN"
        if operands.eden
        else "",
    ]
    said = "; ".join([names, *filter(None, extras)])
    return f"block-gemms: {rounded} of {len(work.operand_formats)} GEMMs round their operands to blocks ({said})"


@dataclass
class _Rewrite:
    work: Work
    operands: Operands
    gradients: frozenset[Node]
    """Nodes that depend on a tangent."""
    found: dict[Node, tuple[Product, BlockFormat]]
    """The GEMM nodes to rewrite."""
    owners: dict[Node, tuple[int, int]] = field(default_factory=dict)
    """For each GEMM node: the GEMM's index and its weights' elements, which the casts get as `Marks.operand_of`."""

    @classmethod
    def of(cls, work: Work, operands: Operands) -> _Rewrite:
        return cls(work, operands, frozenset(work.joint.made_of_tangents()), {})

    def chosen(self, index: int, op: Operator) -> OperandFormats:
        """Choose the format of each product of one GEMM operator, and record the nodes to rewrite."""
        nodes = [node for node in (*op.nodes, *op.backward) if _is_matrix_product(node)]
        forward = [factor for node in nodes if not is_backward(node) for _, factor in _factors(node)]
        weights = [numel_hint(tensor_of(factor)) for factor in forward if self.is_weight(factor)]
        given = self._given(index)
        if not weights:
            why = TWO_VALUES if nodes else f"{op.aten} has no operands in blocks"
            if given is not None and any(_formats(given)):
                self._notice(op, f"gemms[{index}] of the given plan has them in blocks, and {why}")
            return OperandFormats(why=why)
        if given is None and self._is_kept_high(index, op):
            return OperandFormats(why=KEPT_HIGH, is_kept_high=True)
        formats: dict[Product, BlockFormat] = {}
        refused = ""
        for node in nodes:
            product = self.product_of(node)
            fmt = self._wanted(given, product)
            if fmt is None:
                continue
            pads = _sums_over_tokens(node)
            reasons = [how.refusal(factor, pads=pads) for _, factor, how in self.roundings(node, product, fmt)]
            reason = next((reason for reason in reasons if reason), None)
            if reason is None:
                formats[product] = fmt
                self.found[node], self.owners[node] = (product, fmt), (index, sum(weights))
            else:
                refused = refused or f"{product}: {reason}"
        if refused:
            self._notice(op, refused)
        return OperandFormats(formats=formats, why=refused or ("" if given is None else given.operands_why))

    def _notice(self, op: Operator, reason: str) -> None:
        detail = f"the operands stay in {self.work.settings.recipe.hi.name}: {reason}"
        self.work.notices.append(Notice(named(op.name, op.module, op.source), detail))

    def _given(self, index: int) -> Gemm | None:
        """Return the given plan's entry for a GEMM; None if its recipe rounds no operands."""
        given = self.work.given
        return None if given is None or given.recipe.operands is None else given.gemms[index]

    def _is_kept_high(self, index: int, op: Operator) -> bool:
        keep_high = self.work.settings.asked.keep_high
        if keep_high == "ends":
            return index in (0, len(self.work.grouped.gemms) - 1)
        return any(covers(pattern, op.module) for pattern in keep_high)

    def _wanted(self, given: Gemm | None, product: Product) -> BlockFormat | None:
        """Return the format of a product: from the given plan, else from the recipe."""
        if given is None:
            fmt: BlockFormat | None = getattr(self.operands, product)
            return fmt
        name = getattr(given, product)
        return find_blocks(name) if name else None

    def is_weight(self, operand: Node) -> bool:
        """Return whether an operand is a parameter, seen through views, casts and the scaling of smooth-swiglu."""
        node = operand
        while (
            node.target in _SHOWING
            or marks(node).has_scaled_channels
            or (is_view(node) and len(node.all_input_nodes) == 1)
        ):
            node = node.all_input_nodes[0]
        return node.op == "placeholder" and self.work.joint.describe(node).kind == "param"

    def product_of(self, node: Node) -> Product:
        """Return which of a layer's three products a GEMM node computes."""
        if not is_backward(node):
            return "forward"
        return "input_grad" if any(self.is_weight(factor) for _, factor in _factors(node)) else "weight_grad"

    def roundings(self, node: Node, product: Product, fmt: BlockFormat) -> Iterator[tuple[int, Node, Rounding]]:
        """Yield (position among the arguments, operand, rounding) for both operands of a GEMM."""
        operands = self.operands
        is_eden = bool(operands.eden) and product != "forward"
        rotation = operands.eden if is_eden else SIZE if operands.hadamard and product == "weight_grad" else 0
        for (position, factor), axis in zip(_factors(node), (-1, -2), strict=True):
            is_square = operands.square_weights and product != "weight_grad" and not is_eden and self.is_weight(factor)
            is_random = operands.stochastic and factor in self.gradients
            yield position, factor, Rounding(fmt, axis, is_square, is_random, rotation, is_eden)

    def run(self) -> None:
        """Replace the operands by their rounded copies, in graph order."""
        graph = self.work.joint.graph
        casts = OperandCasts(graph, self.work.joint.table, self.work.settings.storage)
        grouped = GroupedOperands(graph)
        for node in list(graph.nodes):
            if node not in self.found:
                continue
            roundings = list(self.roundings(node, *self.found[node]))
            args = list(node.args)
            if node.target is GroupedMm.target:
                roundings, args = grouped.prepared(node, roundings)
            for position, factor, how in roundings:
                args[position] = casts.rounded(factor, how, node, self.owners[node])
            node.args = tuple(args)


def _is_matrix_product(node: Node) -> bool:
    is_product = node.target in _MULTIPLYING and all(tensor_of(factor).ndim >= 2 for _, factor in _factors(node))
    return is_product and float32_function(node) is None


def _sums_over_tokens(node: Node) -> bool:
    """Return whether a grouped product sums over each group's tokens, which are padded to whole blocks."""
    return node.target is GroupedMm.target and tensor_of(node).ndim == 3


def _factors(gemm: Node) -> list[tuple[int, Node]]:
    """Return the two operands of a GEMM, each with its position among the arguments."""
    return [(position, input_at(gemm, position)) for position in ops.GEMM_OPERANDS[gemm.target]]
