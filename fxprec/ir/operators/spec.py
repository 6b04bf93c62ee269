"""The columns of the table of operators: what passes know about one operator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Literal, TypeAlias

Terms: TypeAlias = tuple[tuple[int, ...], ...]
FIRST: Terms = ((0,),)


class Moves(Enum):
    """How an operator views or copies another tensor's data, in the same dtype."""

    ALIAS = auto()  # the same tensor under another name
    SHAPE = auto()  # the same elements in row-major order
    RANK = auto()  # dimensions of size 1 are added or removed
    ORDER = auto()  # dimensions are permuted
    SPREAD = auto()  # elements are broadcast without memory of their own
    PART = auto()  # a part
    PARTS = auto()  # several parts, each of them a result
    STRIDED = auto()  # any window of the memory
    COPY = auto()  # the same elements, copied
    OTHER = auto()  # no pass needs to know how


class Cost(Enum):
    """What Inductor makes of an operator. Without an entry it makes a loop of what torch tags as pointwise, and calls a
    library's kernel for all else."""

    FUSED = auto()  # part of the loop of the operator that reads it
    LIGHT = auto()  # the same, in a few instructions an element; ``exp`` takes many
    REDUCED = auto()  # a loop whose result is written to memory


class Trait(Flag):
    """Boolean properties of an operator."""

    NONE = 0
    CAST = auto()  # converts to another dtype
    GEMM = auto()  # is a GEMM of forward, or contains some
    GEMM_BACKWARD = auto()  # is a GEMM of backward, or contains some
    ATTENTION = auto()  # scaled-dot-product attention, its forward or its backward
    ON_CPU = auto()  # attention's variants for CPUs
    WIDE = auto()  # has a twin that multiplies 16-bit tensors in float32 (`fxprec.kernels.wide_gemms`)
    MUTATES = auto()  # writes a functionalised mutation back to its input
    PASSES_SCALE = auto()  # moves or adds: removing a scale before it costs as little as after it
    AFFINE = auto()  # sum, difference or product
    COMBINES = auto()  # where backward exponentiates its result, its operands' errors are exponentiated
    HANDS_ON_DIVISOR = auto()  # its result is 0, or nearly 0, where its first argument is 0
    SELECTS = auto()  # takes each element from one of two tensors, as a condition says
    MASKS = auto()  # adds to attention's logits, or replaces some
    SCALES = auto()  # multiplies, divides or bounds elements one by one
    SUMS = auto()  # a sum, or a mean, over dimensions
    ZERO = auto()  # the result is 0 everywhere
    TESTS_ABOVE = auto()  # compares with a number; if the number is 0: tests x > 0, or its negation
    TESTS_BELOW = auto()  # compares with a number; if the number is 0: tests x < 0, or its negation
    ORDERS = auto()  # compares which of two tensors is larger
    HEAVY = auto()  # Inductor does not recompute it on a CPU
    WRITES_NEW = auto()  # always writes a new tensor
    WRITES_NEW_OF_TWO = auto()  # writes a new tensor if both operands are computed
    HANDS_ON_VALUES = auto()  # casts, or guards inf and NaN: its result stands for its input's values
    SATURATES = auto()  # a relative error of its argument moves its result and its slope by less than that error
    # For operators of a model:
    BEARS_ROUNDING = auto()  # its backward is linear in what it reads (products, norms, sums) or bounded
    GENTLE = auto()  # an activation of slope 1.2 at most
    SOFTMAX = auto()


@dataclass(frozen=True, slots=True)
class HighReason:
    """Why a tensor stays above 8 bits when it is saved, and in which dtype."""

    why: str
    as_it_is: bool = False
    """Whether it keeps its own dtype instead of the recipe's high format."""
    last_size: int | None = None
    """Only operands whose last dimension has this size stay above 8 bits; None: all operands."""
    unknown: str = ""
    """An operator without a row whose backward reads the tensor, with its node, module and source line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One row: the properties of an operator. Positions are positions of arguments."""

    moves: Moves | None = None
    traits: Trait = Trait.NONE
    terms: Terms = ()
    """The operator as a sum of terms, each a product of arguments: ``mul`` is one term (0, 1), ``add`` two terms (0,)
    and (1,), ``addmm`` the terms (0,) and (1, 2). A scaled gradient may be a factor of a term; all terms of a sum must
    carry one scale; an argument in no term must carry none. An operator without terms is treated as not linear."""
    factors: tuple[int, ...] = ()
    """The tensors that a GEMM multiplies; bias and statistics are no factors."""
    constant_at: int | None = None
    """The argument that gives the value of every element of the result."""
    fills_at: int | None = None
    """The argument that gives the value of some elements of the result."""
    hands_on: Literal["any", "first"] | None = None
    """The argument whose fill values pass unchanged into the result; None: they become ordinary numbers."""
    divisor_at: int | None = None
    """The argument that the operator divides by, or takes the root or logarithm of."""
    exponentiates: tuple[int, ...] = ()
    """The operands that its backward exponentiates."""
    cost: Cost | None = None
    result: HighReason | None = None
    """Why backward may not read the result in 8 bits."""
    operands: HighReason | None = None
    """Why backward may not read the operands in 8 bits."""
