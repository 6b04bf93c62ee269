"""The columns of the table of operators: what passes know about one operator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Literal, TypeAlias

Terms: TypeAlias = tuple[tuple[int, ...], ...]
FIRST: Terms = ((0,),)


class Moves(Enum):
    """How an operator shows or copies another tensor's data, in the same dtype."""

    ALIAS = auto()  # the same tensor under another name
    SHAPE = auto()  # the same elements in row-major order
    RANK = auto()  # dimensions of one element come or go
    ORDER = auto()  # dimensions change places
    SPREAD = auto()  # elements are repeated, in no memory of their own
    PART = auto()  # a part
    PARTS = auto()  # several parts, each a result
    STRIDED = auto()  # any window of the memory
    COPY = auto()  # the same elements in memory of their own
    OTHER = auto()  # no pass asks how


class Cost(Enum):
    """What Inductor makes of an operator that torch does not tag as pointwise; without an entry, a library's kernel."""

    FUSED = auto()  # part of its reader's loop
    REDUCED = auto()  # a loop whose result lies in memory


class Trait(Flag):
    """Facts that hold for an operator or do not."""

    NONE = 0
    CAST = auto()  # converts to another dtype
    GEMM = auto()  # is a GEMM of forward, or contains some
    GEMM_BACKWARD = auto()  # is a GEMM of backward, or contains some
    ATTENTION = auto()  # scaled-dot-product attention, its forward or its backward
    ON_CPU = auto()  # attention's variants for CPUs
    WIDE = auto()  # has a twin that multiplies 16-bit tensors in float32 (`fxprec.kernels.wide_gemms`)
    MUTATES = auto()  # writes a functionalised mutation back to its input
    PASSES_SCALE = auto()  # moves or adds up: a scale comes off before it as cheaply as after
    AFFINE = auto()  # sum, difference or product
    COMBINES = auto()  # what backward exponentiates comes from its operands
    HANDS_ON_DIVISOR = auto()  # what makes its first argument 0 makes its result 0, or nearly
    SELECTS = auto()  # takes each element from one of two, where a condition says
    MASKS = auto()  # adds to attention's logits, or replaces some
    SCALES = auto()  # multiplies, divides or bounds each element by itself
    SUMS = auto()  # a sum, or a mean, over dimensions
    ZERO = auto()  # is 0 everywhere
    ASKS_ABOVE = auto()  # compares with a number; with 0, asks whether, or where not, a value is above
    ASKS_BELOW = auto()  # compares with a number; with 0, asks whether, or where not, a value is below
    ORDERS = auto()  # compares two tensors, which is the larger
    HEAVY = auto()  # Inductor does not repeat it on a CPU
    WRITES_NEW = auto()  # always writes a tensor of its own
    WRITES_NEW_OF_TWO = auto()  # writes a tensor of its own if both operands are computed
    HANDS_ON_VALUES = auto()  # casts, or guards inf and NaN: hands on what it is given
    # Of the operators of a model:
    BEARS_ROUNDING = auto()  # its backward is linear in what it reads (products, norms, sums) or bounded by it
    GENTLE = auto()  # an activation of slope 1.2 at most
    SOFTMAX = auto()


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that stays above 8 bits when it is saved."""

    why: str
    as_it_is: bool = False
    """Whether it keeps its own dtype, and not the recipe's high format."""
    last_size: int | None = None
    """Which operands are meant: those whose last dimension has this size."""
    unknown: str = ""
    """The operator in no table whose backward reads the tensor, and its node, module and source line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One operator. Positions are those of arguments."""

    moves: Moves | None = None
    traits: Trait = Trait.NONE
    terms: Terms = ()
    """The operator as a sum of terms, each a product of arguments: ``mul`` is one term (0, 1), ``add`` two terms (0,)
    and (1,), ``addmm`` the terms (0,) and (1, 2). A scaled gradient may be a factor of a term; all terms of a sum
    must carry one scale; an argument in no term must carry none. Without terms it counts as not linear."""
    factors: tuple[int, ...] = ()
    """The tensors that a GEMM multiplies; the rest (bias, statistics) is no factor."""
    constant_at: int | None = None
    """The number that the result is everywhere."""
    fills_at: int | None = None
    """The number that the result is in places."""
    hands_on: Literal["any", "first"] | None = None
    """Which argument's fill values the result holds. Other operators make ordinary numbers of them."""
    divisor_at: int | None = None
    """What it divides by, or takes the root or logarithm of."""
    exponentiates: tuple[int, ...] = ()
    """The operands that its backward exponentiates."""
    cost: Cost | None = None
    result: Kept | None = None
    """Why its result stays above 8 bits, where backward reads it."""
    operands: Kept | None = None
    """Why its operands stay above 8 bits, where backward reads them."""
