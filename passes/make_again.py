"""Recompute affine images and activations of a stored tensor in backward, from its copy, instead of storing them too.

A norm's result is an affine image of its input: (x - mean) * rstd * weight + bias, where all operands but x are small.
If the input is saved for backward anyway, recomputing the result takes one pass of arithmetic, and its error comes from
the input's copy. The same holds for an activation that is multiplied by another tensor (SwiGLU): the activation's own
backward reads its input. A saturating function (tanh, sigmoid, erf) of a multiple of the input, or of a cubic whose
terms do not cancel, errs no more than the input's copy. So an activation that a model writes out, such as GELU by tanh,
is recomputed as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node

from fxprec.ir.operators import Trait, having
from fxprec.ir.symbolic import Dequantize, Quantize
from fxprec.numerics.blocks import WHOLE_BITS
from fxprec.numerics.formats import parse
from fxprec.passes.analysis import ops, regions
from fxprec.passes.analysis.joint import (
    has_tag,
    is_backward,
    is_view,
    numel_hint,
    operator_of,
    readers,
    tensor_of,
    value,
)
from fxprec.passes.analysis.like_signed import like_signed
from fxprec.passes.analysis.operators import Operator
from fxprec.passes.analysis.replay.kernels import is_square
from fxprec.passes.base import Pass, Work
from fxprec.passes.casts.stored import STATISTIC
from fxprec.passes.compute_high import UNREAD
from fxprec.passes.sites import emit, replace_node
from fxprec.plan import Site

# Activations of slope 1.2 at most, which hardly enlarge the input's error. Near 0 the error relative to the result may
# be larger, which does not matter to a product.
_ACTIVATIONS = frozenset(map(str, having(Trait.GENTLE)))
_AFFINE = having(Trait.AFFINE) | ops.CASTS
_SATURATING = having(Trait.SATURATES)

MADE_AGAIN = f"{UNREAD}: it is recomputed in backward from the stored copy of its input"


@dataclass(frozen=True)
class MakeAgain(Pass):
    """Replace stored copies that only backward reads by recomputation from other copies."""

    name: str = "make-again"

    def apply(self, work: Work) -> None:
        _Copies(work).make_again()


@dataclass
class _Copies:
    work: Work
    read: dict[Node, Node] = field(default_factory=dict)  # value -> its decoded copy
    bits: dict[Node, int] = field(default_factory=dict)  # value -> bits of the copy that backward's value comes from

    def make_again(self) -> None:
        graph, chains = self.work.joint.graph, dict[Node, list[Node]]()
        for q, cast in Quantize.among(Quantize.nodes(graph)):
            decoded = [x for x, _ in Dequantize.among(q.users)]
            if is_backward(q) or len(decoded) != 1:
                continue
            site = self.work.book.sites[cast.row]
            bits = parse(site.format).bits
            chain = self._chain(cast.x, decoded[0], site) if site.reads == "backward" else None
            self.read[cast.x], self.bits[cast.x] = decoded[0], bits if chain is None else self._source_bits(chain)
            if chain is not None:
                chains[q] = chain
                self.work.book.leave_high(cast.row, MADE_AGAIN)
                if site.why and chain[-1].target in _SATURATING:  # the reason why a copy would have been high
                    self.work.book.sites[cast.row] = replace(self.work.book.sites[cast.row], why=MADE_AGAIN)
        for q, chain in reversed(chains.items()):  # a chain from a recomputed value goes first: it adds a reader there
            self._replace(graph, q, chain)
        if chains:
            said = "tensors are recomputed in backward from the stored copy of their input"
            alone = "tensor is recomputed in backward from the stored copy of its input"
            self.work.remarks.append(f"{len(chains)} {said if len(chains) > 1 else alone}")

    def _source_bits(self, chain: list[Node]) -> int:
        return min(self.bits[n] for node in chain for n in node.all_input_nodes if n in self.bits and n not in chain)

    def _chain(self, value_: Node, decoded: Node, site: Site) -> list[Node] | None:
        """Return the nodes that compute a value from one stored value, in order; None if there is no such chain."""
        op = self.work.operators.of_node.get(value_)
        if op is None or op.is_gemm or regions.is_marked(value_):
            return None
        if op.aten in _ACTIVATIONS and not all(self._bears_activation(r) for _, r in readers(decoded)):
            return None
        chain = self._steps(value_, op)
        sources = {n for node in chain or () for n in node.all_input_nodes if n in self.read and n not in (chain or ())}
        return chain if chain and len(sources) == 1 and self._is_precise(chain, site) else None

    def _is_precise(self, chain: list[Node], site: Site) -> bool:
        """Return whether a chain starts from a copy with at least the bits of the copy that it replaces.

        The formats of a plan made under a peak budget are those that the chooser gave later. So such a plan decides.
        """
        if self.work.given is not None and self.work.fits_peak:
            given = self.work.given.sites[site.id]
            return not given.way and given.reads == "all"
        return chain[-1].target in _SATURATING or self._source_bits(chain) >= parse(site.format).bits

    def _bears_activation(self, reader: Node) -> bool:
        """Return whether a reader of an activation tolerates its recomputation, and gains from it.

        A product does. Other formulas may depend on the activation's relative error. A GEMM writes its operand to
        memory anyway, so recomputing the operand costs time. Only a recipe that saves in fewer than 8 bits spends that
        time.
        """
        saved = (self.work.given or self.work.settings).recipe.saved
        spends = saved is not None and saved.bits < WHOLE_BITS and not self.work.fits_peak  # a peak budget decides that
        return reader.target is ops.aten.mul.Tensor or (spends and reader.target in ops.GEMMS_BACKWARD)

    def _steps(self, node: Node, op: Operator) -> list[Node] | None:
        """Return the operator's nodes that compute ``node`` from stored and small values, ``node`` last, or None."""
        is_activation = node in op.nodes and op.aten in _ACTIVATIONS and has_tag(node, torch.Tag.pointwise)
        if node.target in _SATURATING and not is_activation:
            return self._saturated(node)
        if node not in op.nodes:
            return self._shown(node)
        if node.target not in _AFFINE and not is_activation:
            return None
        if is_square(node):
            return None
        steps: list[Node] = []
        large = [n for n in node.all_input_nodes if not self._is_small(n, node)]
        for n in large:
            before = [] if n in self.read else self._steps(n, op)
            if before is None:
                return None
            steps += [step for step in before if step not in steps]
        return [*steps, node] if is_activation or len(large) == 1 else None

    def _saturated(self, node: Node) -> list[Node] | None:
        """Return the nodes that compute ``node`` if its argument is a like-signed polynomial of one stored value."""
        argument = like_signed(node.args[0], lambda n: self._shown(n) is not None)
        if argument is None or argument.source is None:
            return None
        return [*(self._shown(argument.source) or ()), *argument.nodes, node]

    def _shown(self, node: Node) -> list[Node] | None:
        """Return the views between a stored value and ``node``, which may show a part of it; else None."""
        if node in self.read or not is_view(node) or len(node.all_input_nodes) != 1:
            return [] if node in self.read else None
        before = self._shown(node.all_input_nodes[0])
        return None if before is None else [*before, node]

    @staticmethod
    def _is_small(node: Node, beside: Node) -> bool:
        return value(node) is not None and numel_hint(tensor_of(node)) * STATISTIC <= numel_hint(tensor_of(beside))

    def _replace(self, graph: Graph, q: Node, chain: list[Node]) -> None:
        """Replace a copy by a chain of backward nodes before the copy's first reader."""
        (decoded,) = q.users
        made = dict(self.read)  # stored values are read from their copies, small values directly
        with graph.inserting_before(min(decoded.users)):
            for node in chain:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: made.get(n, n))
                val = node.meta["val"]
                made[node] = emit(graph, operator_of(node), args, node, kwargs=kwargs, backward=True, val=val)
        replace_node(decoded, made[chain[-1]])
        graph.erase_node(q)
