"""The saved state of one graph, type-checked entry by entry before anything takes it: a checkpoint is a file too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from fxprec.plan import Plan
from fxprec.plan.entries import Entry
from fxprec.plan.files import read_checked

_WAY_OUT = "pass what state_dict() returned"
_LARGEST_EXP = 1_000  # exponents of scales; float32 holds less
_LARGEST = 2**53
_NOT_FINITE = ("inf", "-inf", "nan")


def check_graph(entry: Entry) -> None:
    """Raise `PlanError`, naming the entry, where a graph's saved state is not what `state_dict` makes."""
    _known(
        entry,
        {"step": _count, "scales": _scales, "plan": partial(read_checked, kind=Plan)},
        required=("step", "scales", "plan"),
    )
    if "pending" in entry.value:
        _each(_pending)(entry.get("pending"))
    if "graph" in entry.value:
        wanted = {"training": _flag, "parameters": _each(_text)}
        _known(entry.get("graph"), {**wanted, "inputs": _each(_each(_text_or_size))}, required=tuple(wanted))


def _known(entry: Entry, readers: Mapping[str, Callable[[Entry], Any]], required: tuple[str, ...]) -> None:
    if not isinstance(entry.value, Mapping):
        raise entry.wrong("an object")
    for key in required:
        if key not in entry.value:
            raise entry.fail(f"has no {key!r}", _WAY_OUT)
    for key, read in readers.items():
        if key in entry.value:
            read(Entry(entry.value[key], f"{entry.path}.{key}"))


def _refuse_unknown(entry: Entry, known: Collection[str]) -> None:
    """Refuse what nothing here checks: of a newer version, or damage."""
    if unknown := entry.value.keys() - set(known):
        raise entry.fail(f"has an unknown key {min(unknown, key=str)!r:.60}", f"{_WAY_OUT}, or update fxprec")


def _scales(entry: Entry) -> None:
    if entry.value is None:
        return
    of_loss = isinstance(entry.value, Mapping) and "good_steps" in entry.value
    required = ("exps", "overflowed", "seen", "good_steps") if of_loss else _OF_EACH
    _known(entry, _SCALES, required)
    _refuse_unknown(entry, _SCALES)


def _each(read: Callable[[Entry], None]) -> Callable[[Entry], None]:
    def check(entry: Entry) -> None:
        for item in entry.items():
            read(item)

    return check


def _rows(read: Callable[[Entry], None]) -> Callable[[Entry], None]:
    """Check an object whose keys are rows of the table, as JSON has them."""

    def check(entry: Entry) -> None:
        if not isinstance(entry.value, Mapping):
            raise entry.wrong("an object")
        for key, value in entry.value.items():
            if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10):
                raise entry.fail(f"has the key {key!r:.60}, which is no row of the table", _WAY_OUT)
            read(Entry(value, f"{entry.path}.{key}"))

    return check


def _statistics(entry: Entry, number: Callable[[Entry], None] | None = None) -> None:
    names = ("overflow_ratio", "underflow_ratio", "amax", "rms", "nonzero_ratio", "mean_ln", "std_ln")
    readers = {"site": _count, **dict.fromkeys(names, number or _number), "counts": _each(_number)}
    _known(entry, readers, required=tuple(readers))
    _refuse_unknown(entry, readers)


def _pending(entry: Entry) -> None:
    """Check statistics of one step that are not acted on yet."""
    readers = {"step": _count_or_none, "statistics": _each(partial(_statistics, number=_any_number))}
    _known(entry, readers, required=tuple(readers))
    _refuse_unknown(entry, readers)


def _any_number(entry: Entry) -> None:
    if entry.value not in _NOT_FINITE:
        _number(entry)


def _count_or_none(entry: Entry) -> None:
    if entry.value is not None:
        _count(entry)


def _number(entry: Entry) -> None:
    if type(entry.value) not in (int, float) or not abs(entry.value) <= _LARGEST**4:
        raise entry.wrong("a finite number")


def _count(entry: Entry) -> None:
    if type(entry.value) is not int or not 0 <= entry.value <= _LARGEST:
        raise entry.wrong("an int from 0 to 2**53")


def _exponent(entry: Entry) -> None:
    if type(entry.value) is not int or abs(entry.value) > _LARGEST_EXP:
        raise entry.wrong(f"an int from -{_LARGEST_EXP} to {_LARGEST_EXP}")


def _flag(entry: Entry) -> None:
    if not isinstance(entry.value, bool):
        raise entry.wrong("true or false")


def _text(entry: Entry) -> None:
    if not isinstance(entry.value, str):
        raise entry.wrong("text")


def _text_or_size(entry: Entry) -> None:
    if type(entry.value) is not str and entry.value != -1:
        _count(entry)


_OF_EACH = ("exps", "measured", "amax", "margins", "saturating", "fresh", "due", "settling", "last_refresh")
_SCALES: Mapping[str, Callable[[Entry], None]] = {
    "exps": _each(_exponent),
    "measured": _each(_statistics),
    "amax": _rows(_number),
    "margins": _rows(_exponent),
    "saturating": _rows(_number),
    "clipped": _rows(_exponent),
    "recent": _rows(_each(_number)),
    "small": _rows(_count),
    "fresh": _each(_count),
    "due": _flag,
    "settling": _count,
    "last_refresh": _count,
    "in_force_since": _count,
    "overflowed": _flag,
    "seen": _flag,
    "good_steps": _count,
}
