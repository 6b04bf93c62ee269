"""Model a training step: which nodes of its joint graph run in forward and in backward, and what backward reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from fxprec.config.processor import Processor
from fxprec.ir.symbolic import QUANTIZE, Dequantize, Quantize, is_in_blocks
from fxprec.numerics.formats import Format, parse
from fxprec.passes.analysis import regions
from fxprec.passes.analysis.joint import JointGraph, input_index, is_view_or_cast, tensor_of, value
from fxprec.passes.analysis.replay.casts import CastKernels
from fxprec.passes.analysis.replay.kernels import HEAVY, Kind, is_aligned, kind_of, result_bytes, workspace_of
from fxprec.passes.analysis.saved_values import is_repeated, needed_by_forward
from fxprec.passes.analysis.signs import bounds


@dataclass
class Step:
    """The nodes of both halves without casts, and the forward values that each backward node reads."""

    joint: JointGraph
    processor: Processor = field(default_factory=Processor.here)
    stepped: Mapping[int, int] = field(default_factory=dict)
    """Position of a captured input that backward steps -> bytes of the step's workspace. Its gradient is not
    returned."""
    cast_kernels: CastKernels = field(default_factory=CastKernels)
    """How the device runs the casts of stored copies."""

    def __post_init__(self) -> None:
        nodes = list(self.joint.graph.nodes)
        self._free: dict[Node, bool] = {}  # of `needs_no_saving`; replays share it
        self.needed = needed_by_forward(self.joint)
        """Nodes that the results of forward depend on."""
        self.casts = {x: cast for q, cast in Quantize.among(nodes) if self._is_cast(q) for x in q.users}
        """Node that decodes a copy -> the cast that made the copy."""
        self.stored = self._stored()
        """The casts of each value that has a copy."""
        self.copied = {cast.x: fmt for cast in self.casts.values() if (fmt := self._copied(cast)) is not None}
        """Inputs that backward reads as a copy -> its format. The copy waits, although the input is there."""
        self.compared = {cast.x for x, cast in self.casts.items() if bounds(x)}
        """Values that backward compares with a number."""
        self.decoded = set(self.casts)
        """Decoded copies, and other nodes that only backward computes, without a gradient: run when a gradient needs
        them."""
        self.forward, self.backward = list[Node](), list[Node]()
        self.backward_set = set[Node]()
        """The nodes in ``backward``: those that depend on a tangent, and gradients that depend on none."""
        self._wanted: dict[Node, dict[Node, None]] = {}  # of nodes in ``decoded``, casts left out
        self._divide({*self.casts, *(q for q in nodes if q.target is QUANTIZE and self._is_cast(q))})
        self.aside = [node for node in self.forward if node not in self.needed and not self.needs_no_saving(node)]
        """Values of forward that its results do not depend on."""
        self.checkpointed = set(self._checkpointed())
        """Nodes that the user's checkpoints recompute in backward and that backward needs."""
        updates = {at: (parameter, gradient) for parameter, at, gradient in self.joint.stepped(self.stepped)}
        self.returned = {n for i, n in enumerate(self.joint.results) if isinstance(n, Node) and i not in updates}
        self.updates = self._placed(updates.values())
        """(parameter, its gradient), by the backward node after which backward steps the parameter."""
        self.operands = {node: tuple(node.all_input_nodes) for node in nodes}
        """Computed once, since a node makes this list anew each time."""
        self.undecoded_operands = {node: tuple(map(self.undecoded, self.operands[node])) for node in self.forward}
        self._traits: dict[Node, tuple[Kind, int, bool, int, bool]] = {}

    def _divide(self, casts: Collection[Node]) -> None:
        """Divide all nodes but casts among forward, backward, and what backward computes without a gradient."""
        results = {*self.joint.results}
        for node in self.joint.graph.nodes:
            if node.op == "output" or node in casts:
                continue
            is_read_back = not self.needs_no_saving(node) and self._is_read_back(node)
            # A rounding's gradient is a constant. Gradients computed from it depend on no tangent, and are returned.
            is_of_tangent = self.joint.is_tangent(node) or any(n in self.backward_set for n in node.all_input_nodes)
            if is_of_tangent or (is_read_back and node in results):
                self.backward_set.add(node)
                self.backward.append(node)
            elif is_read_back:
                self.decoded.add(node)
                self._wanted[node] = self.wanted_by(node)
            else:
                self.forward.append(node)

    def _placed(self, updates: Iterable[tuple[Node, Node]]) -> Mapping[Node, Sequence[tuple[Node, Node]]]:
        order = {node: i for i, node in enumerate(self.backward)}
        found: dict[Node, list[tuple[Node, Node]]] = {}
        for parameter, gradient in updates:
            if gradient in order:
                awaited = {gradient, *self._backward_readers(parameter)}
                found.setdefault(max(awaited, key=order.__getitem__), []).append((parameter, gradient))
        return found

    def _backward_readers(self, node: Node) -> set[Node]:
        """Return the backward nodes that read a value, or a view or conversion of it."""
        found, stack = {node}, [node]
        while stack:
            shown = {x for x in stack.pop().users if x in self.backward_set or is_view_or_cast(x) or x in self.decoded}
            stack += (user for user in shown - found if user not in self.backward_set)
            found |= shown
        return found & self.backward_set

    def workspace_of_stepping(self, parameter: Node) -> int:
        """Return the bytes that a parameter's step allocates while it runs."""
        index = input_index(parameter)
        assert index is not None, "only captured inputs are stepped"
        return self.stepped[index]

    def wanted_by(self, node: Node) -> dict[Node, None]:
        """Return the forward values and decoded copies that a backward node reads, in order."""
        found: dict[Node, None] = {}
        for source in node.all_input_nodes:
            if source in self._wanted:
                found |= self._wanted[source]
            elif source not in self.backward_set:
                found[source] = None
        return found

    def traits_of(self, node: Node) -> tuple[Kind, int, bool, int, bool]:
        """Return a node's kind, bytes, whether it is too expensive to repeat, workspace, and whether it is aligned.

        Replays share them.
        """
        if node not in self._traits:
            kind = Kind.PIECE if self.joint.is_tangent(node) else kind_of(node)
            workspace = workspace_of(node, self.processor)
            self._traits[node] = kind, result_bytes(node), node.target in HEAVY, workspace, is_aligned(node)
        return self._traits[node]

    def undecoded(self, node: Node) -> Node:
        """Return the value whose decoded copy a node is, or the node itself."""
        cast = self.casts.get(node)
        return node if cast is None else cast.x

    def needs_no_saving(self, node: Node) -> bool:
        """Return whether backward has a value without saving it: an input, a constant, or a number."""
        if node not in self._free:
            holds_nothing = value(node) is None and not isinstance(node.meta.get("val"), list | tuple | dict)
            self._free[node] = node.op != "call_function" or holds_nothing
        return self._free[node]

    def may_wait_itself(self, x: Node) -> bool:
        """Return whether an input that a repeated node reads takes the place of its copy for all of backward's readers.

        A parameter does not: it is there anyway, and its copy is what backward multiplies.
        """
        return self.joint.describe(x).kind not in ("param", "table")

    def _checkpointed(self) -> Iterator[Node]:
        wanted = [source for node in self.backward for source in self.wanted_by(node)]
        stack, seen = [self.undecoded(node) for node in wanted], set[Node]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if regions.backward_recomputes(node):
                yield node
                stack += map(self.undecoded, node.all_input_nodes)
            elif is_repeated(node, self.joint):
                stack += node.all_input_nodes

    def _is_read_back(self, node: Node) -> bool:
        """Return whether a node belongs to backward, decodes a copy in blocks for it, or depends on a decoded copy."""
        # A GEMM's operand in blocks is decoded in forward, too.
        is_decode = Dequantize.match(node) is not None and is_in_blocks(node) and node not in self.needed
        return is_decode or self.joint.in_backward(node) or any(n in self.decoded for n in node.all_input_nodes)

    def _stored(self) -> dict[Node, list[Node]]:
        found: dict[Node, list[Node]] = {}
        for q in dict.fromkeys(x.all_input_nodes[0] for x in self.casts):
            found.setdefault(Quantize.of(q).x, []).append(q)
        return found

    def _copied(self, cast: Quantize) -> Format | None:
        """Return the format of an input's copy, or None if the copy would be the input itself."""
        fmt = parse(cast.format)
        is_copy = fmt.torch_dtype is not tensor_of(cast.x).dtype
        return fmt if is_copy and self.needs_no_saving(cast.x) else None

    def _is_cast(self, q: Node) -> bool:
        """Return whether a forward value is stored only to be decoded for backward, and nothing else reads its codes.

        A copy in blocks does not count: its format is fixed. Nor does a copy that forward itself reads, as a
        checkpointed region does. A decode that takes a gradient's scale off is an operator of backward that reads the
        codes.
        """
        if is_in_blocks(q) or any(x in self.needed for x in q.users):
            return False
        reads = [Dequantize.match(user) for user in q.users]
        return not self.joint.in_backward(q) and all(read is not None and read.is_as_stored for read in reads)
