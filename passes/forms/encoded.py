"""Keep a copy that a form encodes and decodes itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat

import torch
from torch.fx import Node

from fxprec.ir.symbolic import Dequantize, Quantize
from fxprec.numerics.blocks import AnyFormat
from fxprec.passes.analysis.joint import numel_hint, tensor_of
from fxprec.passes.analysis.marks import mark
from fxprec.passes.analysis.ways import Demand, Form, row_of
from fxprec.passes.forms.stage import Emitter, Stage
from fxprec.plan.rows import Site


class Encoded(Form):
    """A copy made by `encode` in place of the cast that stored one, and read back by `decode`.

    Only backward reads it, and no other value is recomputed from it. It is offered for values with one cast. In the
    value's row of the plan ``form`` is its way, and ``format`` is the format of the copy that the row had.
    """

    serves = frozenset({Demand.READ_LOW})
    format: AnyFormat

    @abstractmethod
    def encode(self, value: Node, cast: Node, stage: Stage, emit: Emitter) -> Sequence[Node]:
        """Insert the nodes that encode ``value``, in forward; return the tensors to save."""

    @abstractmethod
    def decode(self, saved: Sequence[Node], value: Node, dtype: torch.dtype, emit: Emitter) -> Node:
        """Insert the nodes that read ``value`` back as ``dtype``, in backward; return the last."""

    def store(self, value: Node, stage: Stage) -> None:
        (cast,) = stage.casts[value]
        saved = self.encode(value, cast, stage, Emitter(cast, backward=False))
        for tensor, elements in zip(saved, chain([numel_hint(tensor_of(value))], repeat(0)), strict=False):
            mark(tensor, encodes=(Quantize.of(cast).row, elements))
        for read, call in list(Dequantize.among(cast.users)):
            if read.users:
                read.replace_all_uses_with(self.decode(saved, value, call.dtype, Emitter(read, backward=True)))
            stage.graph.erase_node(read)
        stage.graph.erase_node(cast)
        del stage.casts[value]

    def plan_row(self, site: Site, value: Node, stage: Stage) -> Site:
        return replace(row_of(site, "narrow", self.format.name, ""), form=self.way)

    def matches_row(self, site: Site) -> bool:
        return site.way == "narrow" and site.form == self.way and site.promoted_at is None
