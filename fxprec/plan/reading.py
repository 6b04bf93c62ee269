"""Read JSON data as untrusted input: each reader checks the type of a value and returns the value."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from fxprec.errors import PlanError, did_you_mean

MAX_TEXT = 100_000
SHOWN = 60


@dataclass(frozen=True, slots=True)
class Entry:
    """A JSON value and its path in the file (``sites[3].format``)."""

    value: Any
    path: str = ""
    if_missing: str = "add it, or plan again"
    """The remedy in the error message for a missing key."""

    def fail(self, cause: str, way_out: str) -> PlanError:
        """Return an error that names the path of the value."""
        return PlanError(f"{self.path or 'top level'}: {cause}; {way_out}")

    def wrong(self, wanted: str) -> PlanError:
        """Return an error that shows the value and says what it must be."""
        shown = repr(self.value)
        return self.fail(f"is {shown if len(shown) <= SHOWN else shown[: SHOWN - 3] + '...'}", f"it must be {wanted}")

    def get(self, key: str) -> Entry:
        """Return an object's entry. Raises `PlanError` if the value is not an object, or has no such key."""
        mapping = self.mapping()
        if key not in mapping:
            near = did_you_mean(key, [k for k in mapping if len(str(k)) <= SHOWN])
            raise self.fail(f"has no {key!r}{near.replace('did you mean', 'is it')}", self.if_missing)
        return Entry(mapping[key], f"{self.path}.{key}" if self.path else key, self.if_missing)

    def mapping(self) -> Mapping[str, Any]:
        """Return the value as an object. Raises `PlanError` if it is not one."""
        if not isinstance(self.value, Mapping):
            raise self.wrong("an object")
        return self.value

    def items(self) -> Iterator[Entry]:
        """Yield an array's entries. Raises `PlanError` if the value is not an array."""
        if not isinstance(self.value, list):
            raise self.wrong("an array")
        for i, value in enumerate(self.value):
            yield Entry(value, f"{self.path}[{i}]", self.if_missing)


Reader = Callable[[Entry], Any]
"""A function that returns the checked value of an entry. Raises `PlanError` if type or range is wrong."""


def text(entry: Entry) -> str:
    """Read text of at most `MAX_TEXT` characters. Raises `PlanError`."""
    if not isinstance(entry.value, str):
        raise entry.wrong("text")
    if len(entry.value) > MAX_TEXT:
        raise entry.fail(f"is text of {len(entry.value)} characters", f"the longest allowed has {MAX_TEXT}")
    try:
        entry.value.encode()
    except UnicodeEncodeError:
        raise entry.wrong("text without halves of surrogate pairs") from None
    return entry.value


def integer(least: int, most: int, shown: str) -> Reader:
    """Return a reader of ints from ``least`` to ``most``; ``shown`` is ``most`` as text."""

    def read(entry: Entry) -> int:
        if type(entry.value) is not int or not least <= entry.value <= most:
            raise entry.wrong(f"an int from {least} to {shown}")
        return entry.value

    return read


count = integer(0, 2**63 - 1, "2**63 - 1")
exponent = integer(-(2**31), 2**31 - 1, "2**31 - 1")


def flag(entry: Entry) -> bool:
    """Read true or false. Raises `PlanError`."""
    if not isinstance(entry.value, bool):
        raise entry.wrong("true or false")
    return entry.value


def finite(entry: Entry) -> float:
    """Read a number that is neither infinite nor NaN. Raises `PlanError`."""
    if type(entry.value) not in (int, float) or not abs(entry.value) <= sys.float_info.max:
        raise entry.wrong("a finite number")
    return float(entry.value)


def positive(entry: Entry) -> float:
    """Read a finite number above 0. Raises `PlanError`."""
    if (found := finite(entry)) <= 0:
        raise entry.wrong("a positive number")
    return found


def not_negative(entry: Entry) -> float:
    """Read a finite number of at least 0. Raises `PlanError`."""
    if (found := finite(entry)) < 0:
        raise entry.wrong("a number of at least 0")
    return found


Positive: TypeAlias = Annotated[float, positive]
NotNegative: TypeAlias = Annotated[float, not_negative]


def number(entry: Entry) -> float:
    """Read a number, or the text of one that is not finite. Raises `PlanError`."""
    return float(or_one_of(("nan", "inf", "-inf"), finite)(entry))


def word(*allowed: str) -> Reader:
    """Return a reader of the allowed words, which raises `PlanError` for any other."""

    def read(entry: Entry) -> str:
        if not isinstance(entry.value, str) or entry.value not in allowed:
            hint = did_you_mean(entry.value, allowed) if isinstance(entry.value, str) else ""
            raise entry.wrong(f"one of {', '.join(map(repr, allowed))}{hint}")
        return entry.value

    return read


def or_one_of(others: Sequence[str | None], read: Reader) -> Reader:
    """Return a reader that accepts the values ``others`` unchanged, and reads all other values with ``read``."""
    return lambda entry: entry.value if entry.value in others else read(entry)


def each(read: Reader) -> Reader:
    """Return a reader of arrays that reads every entry with ``read``."""
    return lambda entry: tuple(map(read, entry.items()))


def fields_of(
    readers: Mapping[str, Reader], optional: Collection[str] = (), unread: Collection[str] | None = ()
) -> Reader:
    """Return a reader of objects with these keys, as a dict. Keys in ``unread`` are ignored; None ignores any key."""

    def read(entry: Entry) -> dict[str, Any]:
        given = entry.mapping()
        for key in [] if unread is None else [key for key in given if key not in readers and key not in unread]:
            hint = did_you_mean(str(key), readers) if len(str(key)) <= SHOWN else ""
            raise entry.fail(f"has an unknown key {str(key)[:SHOWN]!r}{hint}", "remove it, or update fxprec")
        wanted = [name for name in readers if name in given or name not in optional]
        return {name: readers[name](entry.get(name)) for name in wanted}

    return read
