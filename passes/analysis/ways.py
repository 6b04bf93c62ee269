"""The ways in which backward gets a forward value: the value is kept in some form, or recomputed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch.fx import Node

from fxprec.config.ways import Way as WayName
from fxprec.numerics.bits import Bit
from fxprec.numerics.blocks import WHOLE_BITS, AnyFormat, BlockFormat, Integer
from fxprec.numerics.formats import E4M3FN, Format
from fxprec.passes.analysis.replay.kernels import Kind
from fxprec.passes.analysis.saved_bytes import stored_bytes
from fxprec.plan.rows import Site

if TYPE_CHECKING:
    from fxprec.passes.base import Work
    from fxprec.passes.forms.candidate import Candidate
    from fxprec.passes.forms.stage import Stage


class Demand(Enum):
    """A use of a value in backward. The demands on a value decide which ways it tolerates."""

    READ = "backward reads the value itself, or rounding to 8 bits would make its error too large"
    READ_LOW = "backward reads an 8-bit copy"
    RECOMPUTE = "another value is recomputed from it exactly"
    RECOMPUTE_LOW = "another value is recomputed from it and may be rounded"


ANY = frozenset(Demand)
LOW = frozenset({Demand.READ_LOW, Demand.RECOMPUTE_LOW})


@dataclass(frozen=True)
class Recompute:
    """The way in which backward recomputes the value; ``demand`` is the demand on the operands of the recomputation."""

    demand: Demand

    is_on_host: ClassVar[bool] = False

    @property
    def serves(self) -> frozenset[Demand]:
        """Return the demands that a recomputed value serves."""
        return ANY if self is FROM_EXACT else LOW


FROM_EXACT, FROM_ROUNDED = Recompute(Demand.RECOMPUTE), Recompute(Demand.RECOMPUTE_LOW)


class Form(ABC):
    """A form in which a value is kept for backward. Frozen, since the chooser treats equal forms as one choice."""

    serves: ClassVar[frozenset[Demand]]
    """The demands that a value in this form serves."""
    counted: ClassVar[str]
    """The words for values in this form in the plan's note, after their number."""
    format: AnyFormat | Bit | None
    """The format of the copy, or the row's format if the copy has none; None: the value itself is kept."""
    kernel: ClassVar[Kind] = Kind.FUSED
    """The kind of kernel that stores the copy: a loop that fuses with others, or a kernel of its own."""
    ways: ClassVar[tuple[str, ...]] = ()
    """The names in `Config.ways` that ask for forms of this class; a notice says which of them no value can have."""
    missing: ClassVar[str]
    """Why no value can have a form of ``ways``, where no value has a reason of its own."""
    is_on_host: ClassVar[bool] = False
    """Whether the tensor waits in host memory."""
    replaces_value: ClassVar[bool] = False
    """Whether forward reads the copy, too, so that the value itself does not stay in memory until its last reader.
    A value to which such a form offers itself has no other."""
    is_random: ClassVar[bool] = False
    """Whether the copy is rounded at random, with the step's seed."""

    @classmethod
    @abstractmethod
    def offers(cls, value: Candidate) -> Iterator[Self]:
        """Yield the forms of this class in which a value may be kept."""

    @classmethod
    def is_asked(cls, work: Work) -> bool:
        """Return whether values are to be offered such a form. A given plan may name any."""
        return not cls.ways or work.given is not None or not set(cls.ways).isdisjoint(work.settings.ways)

    @classmethod
    def is_used_at_any_cost(cls, work: Work) -> bool:
        """Return whether a value that may have such a form has it, whatever it costs."""
        return False

    @property
    @abstractmethod
    def options(self) -> frozenset[str]:
        """Return the options of `Config.ways` that this form needs, all of them."""

    @property
    def way(self) -> str:
        """Return which of ``ways`` asks for this form, ``""`` if none does."""
        return ""

    @property
    def error(self) -> float:
        """Return the relative error, root mean square, that the value gets only in order to be kept in this form."""
        return 0.0

    @property
    def passes(self) -> float:
        """Return the passes over a value in 16 bits that its encoding, its decoding and its error cost.

        e4m3's error costs as much as its encoding and decoding. So among choices equal otherwise, the one without
        rounding wins. 4 bits win against a way that takes longer than 8 passes over a value.
        """
        return 1 + self.error / rounding_error(E4M3FN) if self.error else 0.0

    def num_bytes(self, val: torch.Tensor) -> int:
        """Return the bytes of a value in this form."""
        return stored_bytes(self.format, val)

    @abstractmethod
    def store(self, value: Node, stage: Stage) -> None:
        """Edit the graph so that it keeps ``value`` in this form and backward reads it back."""

    @abstractmethod
    def plan_row(self, site: Site, value: Node, stage: Stage) -> Site:
        """Return the value's row of the plan."""

    @abstractmethod
    def matches_row(self, site: Site) -> bool:
        """Return whether a plan's row asks for this form. The row of a promoted tensor asks for `Own`."""


Way = Recompute | Form


def rounding_error(fmt: AnyFormat) -> float:
    """Return a format's relative error, root mean square, for normal numbers; integers span 7 deviations."""
    if isinstance(fmt, BlockFormat) and isinstance(fmt.element, Integer):
        steps = 7 / fmt.element.largest
        return float(steps / (6 if fmt.bits < WHOLE_BITS else 12) ** 0.5)
    element = fmt.element if isinstance(fmt, BlockFormat) else fmt
    assert isinstance(element, Format)
    return float(2.0 ** -(element.mantissa_bits + 1) / 3**0.5)


def row_of(site: Site, way: WayName, fmt: str, why: str) -> Site:
    """Return the plan's row of a value that backward gets in the way ``way``."""
    reads = "backward" if way == "narrow" else site.reads
    return replace(site, way=way, format=fmt, reads=reads, why=why, unread=False, saved_as="", form="")
