"""Count updates that rounding cancelled: by parameter, by layer, and over time (Zamirai et al. 2020, D.3, Figure 9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from fxprec.errors import ConfigError

By: TypeAlias = Literal["parameter", "layer"]


class CancelledRow(NamedTuple):
    """The number of updates that rounding cancelled, for one parameter or for those of a layer."""

    group: int
    parameter: int
    """Position in its group; for a layer, the position of its first parameter."""
    name: str
    nonzero: int
    """Updates that were not zero, since the counts were last reset."""
    cancelled: int
    """Non-zero updates that changed neither the weight nor its compensation."""

    @property
    def share(self) -> float:
        """Return cancelled / nonzero, or 0 if no update was non-zero."""
        return self.cancelled / self.nonzero if self.nonzero else 0.0


class CancelledSteps(NamedTuple):
    """The updates that were cancelled over some steps."""

    last_step: int
    """The optimizer's last step, counted from 1 since it was made or loaded."""
    rows: list[CancelledRow]


Counts: TypeAlias = dict[tuple[int, int], Tensor]
"""(non-zero, cancelled), int64, by group and position."""


@dataclass
class History:
    """What was counted in every so many steps, kept on the device and read later."""

    step: int = 0
    _at: list[tuple[int, Counts]] = field(default_factory=list)
    _base: Counts = field(default_factory=dict)
    """The counts at the last record, or since they were reset."""

    def note(self, counts: Counts, every: int) -> None:
        """Count a step; keep what is new at each multiple of ``every``."""
        self.step += 1
        if self.step % every == 0:
            base, self._base = self._base, {key: c.clone() for key, c in counts.items()}
            self._at.append((self.step, {key: c - base[key] if key in base else c for key, c in self._base.items()}))

    def begin_again(self) -> None:
        """Note that the counts were reset to zero."""
        self._base = {}

    def read(self) -> list[tuple[int, dict[tuple[int, int], tuple[int, int]]]]:
        """Return each record's step and what was counted since the record before."""
        return [(step, {key: (int(c[0]), int(c[1])) for key, c in counts.items()}) for step, counts in self._at]


def by_layer(rows: Sequence[CancelledRow]) -> list[CancelledRow]:
    """Add up the rows of each module's parameters. Raises `ConfigError` if parameters have no names."""
    found: dict[tuple[int, str], CancelledRow] = {}
    for row in rows:
        if not row.name.endswith("'"):
            raise ConfigError(
                f"{row.name} has no name, so its layer is unknown; give the optimizer model.named_parameters()"
            )
        name = row.name.removeprefix("parameter '").removesuffix("'").rpartition(".")[0]
        known = found.get((row.group, name), row._replace(name=name, nonzero=0, cancelled=0))
        total = known._replace(nonzero=known.nonzero + row.nonzero, cancelled=known.cancelled + row.cancelled)
        found[row.group, name] = total
    return list(found.values())
