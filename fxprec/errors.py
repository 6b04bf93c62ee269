"""Every exception fxprec raises on purpose.

Each message is one line: the thing, the cause, the way out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Self


class FxprecError(Exception):
    """Base of every error fxprec raises on purpose."""


class ConfigError(FxprecError, ValueError):
    """An option is unknown, ill-typed, out of range, or contradicts another."""


class FormatError(FxprecError, ValueError):
    """A number format cannot exist, or cannot do what was asked of it."""


class PlanError(FxprecError, ValueError):
    """A plan file is unreadable, malformed, or belongs to another model."""


class BudgetError(FxprecError, ValueError):
    """No assignment meets the requested ratio or budget."""

    found: str = ""
    """What the least step found holds, of a budget for its peak."""
    enough: int = 0
    """Bytes that would do in the place of that budget; 0: not known."""
    ways: tuple[str, ...] = ()
    """Other ways out."""

    @classmethod
    def of_peak(cls, asked: str, found: str, enough: int, said: str, ways: Iterable[str]) -> Self:
        """Return the error of a peak budget. ``said``: the budget that would do, as users may give it."""
        error = cls(f"peak_budget is {asked}, and {found}; {either(f'raise it to {said}', *ways)}")
        error.found, error.enough, error.ways = found, enough, tuple(ways)
        return error


def either(*ways: str) -> str:
    """Return the ways out of an error, two at least, as a message lists them."""
    return f"{', '.join(ways[:-1])} or {ways[-1]}"


class LoweringError(FxprecError, RuntimeError):
    """A plan cannot be made real on this device, dtype or version."""


class PassError(FxprecError, RuntimeError):
    """A pass failed: a fault of fxprec."""


class DoubleBackwardError(FxprecError, RuntimeError):
    """Second derivatives were asked of a compiled graph, which has none."""


class ModifiedInPlaceError(FxprecError, RuntimeError):
    """A parameter or input changed between a forward pass and the backward pass that reads its stored copy."""


class FallbackError(FxprecError, RuntimeError):
    """Under ``strict=True``: something asked for would have been left out."""


class NonfiniteError(FxprecError, ArithmeticError):
    """With ``on_nonfinite="raise"``: a tensor of the step before held an inf or a NaN."""


class GradientError(FxprecError, RuntimeError):
    """A gradient is not finite where ``error_if_nonfinite`` forbids it."""


class LostRankError(FxprecError, RuntimeError):
    """An exchange of gradients ended because a rank or a link is gone; the message names it."""


class NativeArgumentError(FxprecError, ValueError):
    """A tensor given to a compiled kernel is not the memory that kernel walks: dtype, size, layout or device."""


class NumericsError(FxprecError, AssertionError):
    """Numerics are not what they should be; the message is a table of the worst tensors, not one line."""


class GoldenError(FxprecError, ValueError):
    """A golden file of the numerics kit is unreadable, edited into nonsense, or of another version."""


class ReferenceRunError(FxprecError, RuntimeError):
    """A model cannot run in a precision it is to be compared with."""


class GpuCheckError(FxprecError, AssertionError):
    """A kernel or a training step on this GPU does not do what the reference does."""


class FxprecWarning(UserWarning):
    """Something asked for was left out; the message names node, module and source line."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
