"""The joint graph while forms store values in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from fxprec.ir.calls import Call
from fxprec.numerics.formats import Format
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.analysis.ops import CONVERT
from fxprec.passes.analysis.ways import Form
from fxprec.passes.base import Work
from fxprec.passes.casts.seed import draw_seed
from fxprec.passes.sites import emit, insertion_point_after, set_format

if TYPE_CHECKING:
    from fxprec.passes.crossings.needs import Needs


@dataclass(frozen=True)
class Emitter:
    """Inserts nodes in front of ``before``, with its origin, in one half of the step."""

    before: Node
    backward: bool

    def __call__(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        val: torch.Tensor | None = None,
    ) -> Node:
        """Insert a node as `emit` does."""
        graph = self.before.graph
        with graph.inserting_before(self.before):
            return emit(graph, target, args, self.before, kwargs=kwargs, backward=self.backward, val=val)

    def call(self, call: Call) -> Node:
        """Insert a call of one of fxprec's operators."""
        return self(call.target, call.args)


@dataclass
class Stage:
    """State shared by all forms that store values in one joint graph."""

    work: Work
    needs: Needs
    kept: Mapping[Node, Form]
    decoded: dict[Node, Node] = field(default_factory=dict)
    """For each value the node that decodes its stored copy."""

    def __post_init__(self) -> None:
        self.graph: Graph = self.work.joint.graph
        self.hi: Format = self.work.settings.recipe.hi
        self.casts: dict[Node, list[Node]] = {value: [*casts] for value, casts in self.needs.step.stored.items()}

    @cached_property
    def seed(self) -> Node:
        """Return the step's seed, drawn before the first cast that rounds at random."""
        return draw_seed(self.graph, min(self.casts[node][0] for node, form in self.kept.items() if form.is_random))

    def store_copy(self, value: Node, fmt: Format) -> None:
        """Store a copy in the format ``fmt``, in place of a copy that is stored already."""
        for q in self.casts.get(value, ()):
            set_format(fmt, q)
            self.decoded[value] = next(iter(q.users))
        if value not in self.casts:
            with self.graph.inserting_before(insertion_point_after(value).next):
                _, self.decoded[value] = self.work.book.cast(value, self.needs.rows[value], fmt)

    def as_dtype(self, value: Node, dtype: torch.dtype, before: Node) -> Node:
        """Return ``value`` in ``dtype``: the value itself, or a conversion inserted before a node of backward."""
        if tensor_of(value).dtype == dtype:
            return value
        with self.graph.inserting_before(before):
            wide = tensor_of(value).to(dtype)
            return emit(self.graph, CONVERT, (value, dtype), value, backward=True, val=wide)
