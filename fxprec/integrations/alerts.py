"""Alerts: rules on the statistics of tensors, such as ``("layers.*:grad_output", "underflow_ratio > 0.5")``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxprec.config.tensor_patterns import TensorPattern, tensor_patterns
from fxprec.driver.backend import Backend
from fxprec.errors import ConfigError, did_you_mean

NUMBERS = ("amax", "overflow_ratio", "underflow_ratio", "scale_exponent")
_RULE = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*(\S+)\s*")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le
}  # fmt: skip


@dataclass(frozen=True)
class Alert:
    """A pattern of tensors, and a limit for one of their statistics."""

    pattern: str
    number: str
    """One of `NUMBERS`."""
    sign: str
    limit: float

    @classmethod
    def of(cls, given: object) -> Alert:
        """Return the alert of a pair (pattern, rule). Raises `ConfigError` for a malformed pair."""
        if not isinstance(given, tuple | list) or len(given) != 2 or not all(isinstance(part, str) for part in given):
            raise ConfigError(f"alert {given!r}; give it (pattern, rule), as ('layers.*', 'underflow_ratio > 0.5')")
        pattern, rule = given
        tensor_patterns("alerts", (pattern,))
        found = _RULE.fullmatch(rule)
        limit = None if found is None else _number(found[3])
        if found is None or limit is None:
            raise ConfigError(f"alert rule {rule!r} is not a comparison; write it as 'overflow_ratio > 0.01'")
        if found[1] not in NUMBERS:
            hint = did_you_mean(found[1], NUMBERS)
            raise ConfigError(
                f"alert rule {rule!r}: unknown number {found[1]!r}{hint}; use one of {', '.join(NUMBERS)}"
            )
        return cls(pattern, found[1], found[2], limit)

    @property
    def rule(self) -> str:
        """The rule as text, such as ``overflow_ratio > 0.1``."""
        return f"{self.number} {self.sign} {self.limit:g}"

    def takes(self, row: Mapping[str, Any]) -> bool:
        """Return whether the pattern matches the tensor of a row of `Backend.stats`."""
        return TensorPattern.of(self.pattern).takes(row["tensor"], row["kind"], row["module"])

    def fires(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row of statistics is beyond the limit."""
        value = row[self.number]
        return value is not None and _COMPARE[self.sign](value, self.limit)


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return None if math.isnan(found) else found


def alerts_of(given: Iterable[object]) -> tuple[Alert, ...]:
    """Return the alerts of pairs (pattern, rule). Raises `ConfigError` for a malformed pair."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"alerts is {given!r}; give it a tuple of (pattern, rule)")
    return tuple(map(Alert.of, given))


def note_alerts(backend: Backend, rows: Sequence[Mapping[str, Any]], alerts: Iterable[Alert]) -> int:
    """Note an ``"alert"`` event for each tensor that is newly beyond a limit; return how many tensors are beyond one.

    ``rows`` are the backend's statistics. A pattern that matches no stored tensor gives one warning.
    """
    firing = 0
    for alert in alerts:
        taken = [row for row in rows if alert.takes(row)]
        if rows and not taken:
            known = sorted({row["module"] for row in rows if row["module"]} or {row["tensor"] for row in rows})
            hint = did_you_mean(alert.pattern.rpartition(":")[0] or alert.pattern, known)
            backend.tell(
                "alerts", f"pattern {alert.pattern!r} matches no stored tensor{hint}; there are {_first(known)}"
            )
        found: dict[tuple[int, int], float | None] = {}
        for row in taken:
            place = (row["graph"], row["site"])
            found[place] = row[alert.number] if alert.fires(row) else found.get(place)
        for (graph, site), value in found.items():
            detail = None if value is None else f"{alert.number} is {value:.4g}, alert at {alert.sign} {alert.limit:g}"
            backend.alert(graph, site, alert.rule, detail)
            firing += value is not None
    return firing


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
