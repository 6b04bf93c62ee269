"""Keep a copy that a form encodes and decodes itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch.fx import Node

from fxprec.ir.symbolic import Dequantize
from fxprec.passes.analysis.ways import Demand, Form
from fxprec.passes.forms.stage import Emitter, Stage


class Encoded(Form):
    """A copy made by `encode` in place of the cast that stored one, and read back by `decode`.

    Only backward reads it, and no other value is recomputed from it. It is offered for values with one cast.
    """

    serves = frozenset({Demand.READ, Demand.READ_LOW})

    @abstractmethod
    def encode(self, value: Node, cast: Node, stage: Stage, emit: Emitter) -> Sequence[Node]:
        """Insert the nodes that encode ``value``, in forward; return the tensors to save."""

    @abstractmethod
    def decode(self, saved: Sequence[Node], value: Node, dtype: torch.dtype, emit: Emitter) -> Node:
        """Insert the nodes that read ``value`` back as ``dtype``, in backward; return the last."""

    def store(self, value: Node, stage: Stage) -> None:
        (cast,) = stage.casts[value]
        saved = self.encode(value, cast, stage, Emitter(cast, backward=False))
        for read, call in list(Dequantize.among(cast.users)):
            if read.users:
                read.replace_all_uses_with(self.decode(saved, value, call.dtype, Emitter(read, backward=True)))
            stage.graph.erase_node(read)
        stage.graph.erase_node(cast)
        del stage.casts[value]
