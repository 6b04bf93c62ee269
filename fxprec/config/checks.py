"""Check single option values: each function returns the value in canonical form or raises `ConfigError`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, Self, SupportsFloat, SupportsInt, TypeVar, cast

from fxprec.errors import ConfigError, FormatError, did_you_mean
from fxprec.numerics.blocks import BlockFormat, find_blocks

F = TypeVar("F")

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*", re.ASCII)


_PERCENT = re.compile(r"\s*(\d{1,3}(?:\.\d{1,20})?)\s*%\s*", re.ASCII)


class Options:
    """Base of dataclasses of options, whose constructor raises `ConfigError` for an unknown or missing name."""

    def __new__(cls, *args: object, **given: object) -> Self:
        """Raise `ConfigError` for a name that is not an option, and for a missing required option."""
        known: dict[str, Field[object]] = cls.__dict__["__dataclass_fields__"]
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known)
                raise ConfigError(f"{cls.__name__} has no option {name!r}{hint}; it has {', '.join(known)}")
        for name, field in known.items() if given else ():  # copying and unpickling pass no options
            if name not in given and field.default is MISSING:
                raise ConfigError(f"{cls.__name__} needs {name!r}, which is missing; add it")
        return super().__new__(cls)


def options_of(value: object, allowed: str = "such as {'recipe': 'fp8', 'low_ratio': 0.6}") -> Mapping[str, Any]:
    """Return options as a mapping; None gives an empty one. Raises `ConfigError` for anything else."""
    if value is None or isinstance(value, Mapping):
        return value or {}
    raise ConfigError(f"options is {value!r}; give it a dict {allowed}")


def one_of(field: str, value: object, allowed: Sequence[str], others: str = "") -> str:
    """Return ``value`` if it is one of the allowed words. Raises `ConfigError`."""
    if isinstance(value, str) and value in allowed:
        return value
    choices = ", ".join(map(repr, allowed)) + (f", {others}" if others else "")
    if not isinstance(value, str):
        raise ConfigError(f"{field} is {value!r}; give it one of {choices}")
    raise ConfigError(f"unknown {field} {value!r}{did_you_mean(value, allowed)}; allowed: {choices}")


def number(field: str, value: object, allowed: str) -> float:
    """Return ``value`` as a float. Raises `ConfigError`, also for a bool and NaN."""
    if isinstance(value, bool) or not isinstance(value, Real):
        share = _percent(value)
        raise ConfigError(f"{field} is {value!r}; give it {f'{float(share) / 100:g}, ' if share else ''}{allowed}")
    found = float(cast(SupportsFloat, value))
    if math.isnan(found):
        raise ConfigError(f"{field} is NaN; give it {allowed}")
    return found


def above_zero(field: str, value: object, allowed: str, *, or_zero: bool = False) -> float:
    """Return ``value`` as a finite float above 0, or at least 0 with ``or_zero``. Raises `ConfigError`."""
    found = number(field, value, allowed)
    if not 0 <= found < math.inf or (found == 0 and not or_zero):
        raise ConfigError(f"{field} is {value!r}, out of range; give it {allowed}")
    return found


def ratio(field: str, value: object, *, above_zero: bool = False) -> float | None:
    """Return a number from 0 to 1 (without 0 if ``above_zero``) or None. Raises `ConfigError`."""
    if value is None:
        return None
    allowed = f"a number {'above 0 and up to 1' if above_zero else 'from 0 to 1'}, or None"
    found = number(field, value, allowed)
    if not 0 <= found <= 1 or (above_zero and found == 0):
        raise ConfigError(f"{field} is {value!r}, out of range; give it {allowed}")
    return found


def integer(field: str, value: object, *, least: int) -> int:
    """Return ``value`` as an int of at least ``least``. Raises `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(cast(SupportsInt, value)) < least:
        raise ConfigError(f"{field} is {value!r}; give it an int of at least {least}")
    return int(cast(SupportsInt, value))


def boolean(field: str, value: object) -> bool:
    """Return ``value`` if it is True or False itself. Raises `ConfigError`."""
    if not isinstance(value, bool):
        raise ConfigError(f"{field} is {value!r}; give it True or False")
    return value


def path(field: str, value: object, what: str) -> str | None:
    """Return a path as text, or None. Raises `ConfigError`."""
    if value is None:
        return None
    found = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(found, str) or not found or "\0" in found:
        raise ConfigError(f"{field} is {value!r}; give it the path of {what}, or None")
    return found


def byte_size(field: str, value: object, *, or_zero: bool = False, or_else: str = "") -> int | None:
    """Return bytes (rounded down) from a positive int or text such as ``"12GiB"``, ``"512 MiB"``, ``"1.5GB"``.

    ``or_else`` is appended to the allowed values in the error message. Raises `ConfigError`.
    """
    if value is None or (or_zero and type(value) is int and value == 0):
        return value
    allowed = "a positive number of bytes, as an int or as text such as '12GiB', '512MiB' or '1.5GB'" + or_else
    if isinstance(value, str):
        found = _parse_size(value)
        if found is None:
            raise ConfigError(f"{field} is {value!r}, which is not a size; give it {allowed}")
    elif isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{field} is {value!r}; give it {allowed}")
    else:
        found = int(cast(SupportsInt, value))
    if found < 1:
        raise ConfigError(f"{field} is {value!r}, not positive; give it {allowed}")
    return found


def byte_size_or_share(field: str, value: object) -> int | str | None:
    """Return bytes like `byte_size`, or a share above 0% and up to 100% such as ``"60%"``. Raises `ConfigError`."""
    if not isinstance(value, str) or not value.rstrip().endswith("%"):
        return byte_size(field, value, or_else=", or a share, as text such as '60%'")
    number = _percent(value)
    if not number:
        raise ConfigError(f"{field} is {value!r}; give it a share above 0% and up to 100%, as text such as '60%'")
    return f"{number}%"


def share_hint(value: object) -> str:
    """Return which options take the share ``value``, as the end of an error message; "" if it is no share."""
    if not (share := _percent(value)):
        return ""
    return f"; a share of the elements is low_ratio={float(share) / 100:g}, one of the peak peak_budget='{share}%'"


def _percent(value: object) -> str:
    """Return the digits of text such as ``"60%"``; "" for any other value, and unless above 0 and up to 100."""
    found = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    return found[1] if found and 0 < Fraction(found[1]) <= 100 else ""


def some_of(field: str, value: object, allowed: Sequence[str]) -> tuple[str, ...]:
    """Return the allowed words in ``value``, at least one, each once, in ``allowed``'s order. Raises `ConfigError`."""
    words = (value,) if isinstance(value, str) else value
    choices = f"a tuple of some of {', '.join(map(repr, allowed))}"
    if not isinstance(words, list | tuple) or not words:
        raise ConfigError(f"{field} is {value!r}; give it {choices}")
    for word in words:
        one_of(field, word, allowed)
    return tuple(word for word in allowed if word in words)


def format_of(field: str, value: object, kind: type[F], find: Callable[[str], F], allowed: str) -> F:
    """Return a ``value`` of type ``kind``, or the format that ``find`` returns for a name. Raises `ConfigError`."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{field} is {value!r}; give it {allowed}")
    try:
        return find(value)
    except FormatError as error:
        raise ConfigError(f"{field}: {error}") from None


def block_format(field: str, value: object, example: str) -> BlockFormat | None:
    """Return a block format, given as such or by its name; None for None and "". Raises `ConfigError`."""
    if value is None or value == "":
        return None
    allowed = f"a fxprec.BlockFormat or its name, such as {example!r}"
    return format_of(field, value, BlockFormat, find_blocks, allowed)


def _parse_size(text: str) -> int | None:
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    unit = next((size for name, size in _UNITS.items() if name.lower() == match[2].lower()), None)
    return None if unit is None else int(Fraction(match[1]) * unit)
