"""Every exception and warning class of fxprec.

Each message is one line: what failed, why, and what the user can do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self


class FxprecError(Exception):
    """Base of every error fxprec raises on purpose."""


class ConfigError(FxprecError, ValueError):
    """An option is unknown, ill-typed, out of range, or contradicts another."""


class FormatError(FxprecError, ValueError):
    """A number format is impossible, or does not support the requested operation."""


class PlanError(FxprecError, ValueError):
    """A plan file is unreadable, malformed, or belongs to another model."""


class BudgetError(FxprecError, ValueError):
    """No assignment meets the requested ratio or budget."""

    asked: str = ""
    """For a peak budget: the budget, as text."""
    found: str = ""
    """For a peak budget: how much the smallest plan found keeps in memory, as text."""
    enough: int = 0
    """Bytes of a peak budget that could be met; 0 if unknown."""
    high: int = 0
    """Bytes of the step's peak with every value saved; 0 if the budget cannot be a share of it."""
    ways: tuple[str, ...] = ()
    """What the user can do instead of raising the budget."""

    @classmethod
    def of_peak(cls, asked: str, found: str, enough: int, said: str, ways: Iterable[str], high: int = 0) -> Self:
        """Return the error for a peak budget that no plan meets. ``said``: how far to raise the budget, as text."""
        error = cls(f"peak_budget is {asked}, and {found}; {either(f'raise it {said}', *ways)}")
        error.asked, error.found, error.enough, error.ways, error.high = asked, found, enough, tuple(ways), high
        return error


def either(*ways: str) -> str:
    """Join remedies into "a, b or c" for an error message."""
    return " or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))


class LoweringError(FxprecError, RuntimeError):
    """A plan cannot be compiled for this device, dtype or version."""


class PassError(FxprecError, RuntimeError):
    """A pass failed: a bug of fxprec."""


class DoubleBackwardError(FxprecError, RuntimeError):
    """Second derivatives were requested of a compiled graph, which has none."""


class ModifiedInPlaceError(FxprecError, RuntimeError):
    """A parameter or input was modified between a forward pass and the backward pass that reads its stored copy."""


class FallbackError(FxprecError, RuntimeError):
    """Under ``strict=True``: a requested option or optimization could not be applied."""


class NonfiniteError(FxprecError, ArithmeticError):
    """With ``on_nonfinite="raise"``: a tensor of an earlier step contained an inf or a NaN, or the loss jumped."""


class GradientError(FxprecError, RuntimeError):
    """A gradient is not finite although ``error_if_nonfinite`` is set."""


class LostRankError(FxprecError, RuntimeError):
    """A gradient exchange ended because a rank or a link is gone; the message names the rank or link."""


class NativeArgumentError(FxprecError, ValueError):
    """A tensor has a dtype, size, layout or device that the compiled kernel it was passed to cannot read."""


class NumericsError(FxprecError, AssertionError):
    """A numerics check failed; the message is a table of the worst tensors, not one line."""


class GoldenError(FxprecError, ValueError):
    """A golden file of the numerics kit is unreadable, has invalid content, or is of another version."""


class ReferenceRunError(FxprecError, RuntimeError):
    """A model cannot run in the reference precision that it should be compared with."""


class GpuCheckError(FxprecError, AssertionError):
    """A kernel or a training step on this GPU gives another result than the reference."""


class FxprecWarning(UserWarning):
    """A requested option or optimization was not applied; the message names node, module and source line."""


@contextmanager
def writing(place: object, what: str = "folder") -> Iterator[None]:
    """Raise `ConfigError` in place of an OSError inside the block, which writes to ``place``, a ``what``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{place}: cannot be written: {error.strerror or error}; choose a writable {what}") from None


def first_line(error: BaseException) -> str:
    """Return ``Type: message``, with the first line of the message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
