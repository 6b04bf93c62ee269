"""The ways in which backward has a value of forward: it is kept in some form, or computed again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.fx import Node

from fxprec.numerics.blocks import AnyFormat
from fxprec.passes.analysis.replay.kernels import Kind
from fxprec.passes.analysis.saved_bytes import stored_bytes
from fxprec.plan.rows import Site
from fxprec.plan.rows import Way as WayName

if TYPE_CHECKING:
    from fxprec.passes.forms.stage import Stage


class Demand(Enum):
    """What is asked of a value that backward has."""

    READ = "backward reads it itself, or rounding to 8 bits would spoil it"
    READ_LOW = "backward reads a copy in 8 bits"
    AGAIN = "another value is computed again from it, exactly"
    AGAIN_LOW = "another value is computed again from it, and may be rounded"


ANY = frozenset(Demand)
LOW = frozenset({Demand.READ_LOW, Demand.AGAIN_LOW})


@dataclass(frozen=True)
class Again:
    """Backward computes the value again; ``asks`` says what of its operands."""

    asks: Demand

    is_on_host: ClassVar[bool] = False

    @property
    def bears(self) -> frozenset[Demand]:
        """Return the demands that a value which is computed again serves."""
        return ANY if self is AGAIN else LOW


AGAIN, ROUNDED = Again(Demand.AGAIN), Again(Demand.AGAIN_LOW)


class Form(ABC):
    """A form in which a value is kept. Frozen: equal forms are one choice."""

    bears: ClassVar[frozenset[Demand]]
    """The demands that a value in this form serves."""
    counted: ClassVar[str]
    """What the plan's note calls the values in this form, after their number."""
    error: ClassVar[float | None] = None
    """Relative error, root mean square, of what backward reads back; None: that of ``format``."""
    kernel: ClassVar[Kind] = Kind.FUSED
    """What stores the copy: a loop that fuses with others, or a kernel of its own."""
    is_on_host: ClassVar[bool] = False
    """Whether it waits in host memory."""
    is_rounded: ClassVar[bool] = False
    """Whether storing it takes rounding that nothing else asks for."""
    is_random: ClassVar[bool] = False
    """Whether it is rounded at random, by the step's seed."""

    @property
    @abstractmethod
    def options(self) -> frozenset[str]:
        """The options among `Config.ways` that allow it, all of them needed."""

    @property
    @abstractmethod
    def format(self) -> AnyFormat | None:
        """Format of the copy, or of the row of one that is in no format; None: the value itself waits."""

    def num_bytes(self, val: torch.Tensor) -> int:
        """Return the bytes of a value in this form."""
        return stored_bytes(self.format, val)

    @abstractmethod
    def store(self, value: Node, stage: Stage) -> None:
        """Have the graph keep ``value`` in this form, and backward read it back."""

    @abstractmethod
    def said(self, site: Site, value: Node, stage: Stage) -> Site:
        """Return the value's row of the plan."""

    @abstractmethod
    def is_said_by(self, site: Site) -> bool:
        """Say whether a row of a plan asks for this form. What was promoted asks for `Own`."""


Way = Again | Form


def row_of(site: Site, way: WayName, fmt: str, why: str) -> Site:
    """Return a row of the plan for a value that goes a way."""
    reads = "backward" if way == "narrow" else site.reads
    return replace(site, way=way, format=fmt, reads=reads, why=why, unread=False, saved_as="")
