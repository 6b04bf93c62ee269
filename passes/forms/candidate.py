"""A value as forms see it when they offer themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from fxprec.numerics.formats import Format
from fxprec.passes.analysis.block_copies import Refusals
from fxprec.passes.analysis.joint import tensor_of
from fxprec.passes.analysis.replay.step import Step
from fxprec.passes.base import Work
from fxprec.plan import Site


@dataclass(kw_only=True)
class Candidate:
    """A forward value that backward reads, or from which it may recompute such a value."""

    node: Node
    step: Step
    work: Work
    refusals: Refusals
    own: Format | None
    """The format of a copy that replaces the value; None: the value itself is kept."""
    low: Format | None
    """The format of an 8-bit copy that may replace the value; None: there may be none."""
    site: Site | None
    is_read_as_it_is: bool
    """Whether backward reads the value itself."""
    has_form: bool
    """Whether the value must have a form already, which no offer changes."""
    refused: dict[str, str] = field(default_factory=dict, init=False)
    """Why the value may be in none of the forms that were asked for, by their names."""

    @property
    def val(self) -> torch.Tensor:
        """Return the fake tensor."""
        return tensor_of(self.node)

    @property
    def casts(self) -> list[Node]:
        """Return the casts that store copies of the value."""
        return self.step.stored.get(self.node, [])

    @property
    def is_returned(self) -> bool:
        """Return whether the step returns the value."""
        return self.node in self.step.returned
