"""What a row of the suite is, and a runner that survives a failing one."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fxprec import compat


@dataclass(frozen=True)
class Setting:
    """Where and how large. ``tiny`` runs through everything at sizes that say nothing about speed."""

    device: torch.device
    tiny: bool
    repeats: int
    deadline: float = float("inf")
    """When, by ``time.perf_counter()``, nothing new is begun."""

    @property
    def compiles(self) -> bool:
        """Whether graphs are compiled; without a GPU they are interpreted."""
        return self.device.type == "cuda"

    @property
    def no_fp8(self) -> str | None:
        """Why the device has no 8-bit floats, or None."""
        return compat.no_native_fp8(self.device)

    @property
    def is_over(self) -> bool:
        return time.perf_counter() > self.deadline


@dataclass
class Row:
    """One line of the table."""

    section: str
    name: str
    value: float
    unit: str
    wanted: str = ""
    met: bool | None = None
    """Whether what issue 4 wants is met; None where it wants nothing."""
    detail: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        verdict = {None: "", True: "met", False: "MISSED"}[self.met]
        return f"{self.section:12} {self.name:44} {self.value:10.4g} {self.unit:10} {self.wanted:10} {verdict}"


@dataclass(frozen=True)
class Failure:
    """A section that raised, or was not begun."""

    section: str
    reason: str
    trace: str = ""


Section = Callable[[Setting], Iterator[Row]]


@dataclass
class Suite:
    """Runs sections in order until the time is up; keeps what each yielded before it failed."""

    setting: Setting
    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    took: dict[str, float] = field(default_factory=dict)

    def run(self, sections: dict[str, Section], after: Callable[[Suite], None] = lambda suite: None) -> None:
        """Run every section; ``after`` is called behind each."""
        for name, section in sections.items():
            start = time.perf_counter()
            if self.setting.is_over:
                self.failures.append(Failure(name, "not begun: the time is over (--seconds, or --only to choose)"))
                continue
            self._section(name, section)
            self.took[name] = round(time.perf_counter() - start, 1)
            after(self)

    def _section(self, name: str, section: Section) -> None:
        try:
            for row in section(self.setting):
                if self.setting.tiny and name != "correctness":
                    row.wanted, row.met = "", None  # such sizes say nothing about speed
                self.rows.append(row)
                print(row.line(), flush=True)
        except Exception as error:  # one row must not cost the others
            message = str(error).partition("\n")[0]
            self.failures.append(Failure(name, f"{type(error).__name__}: {message}", traceback.format_exc()))
            print(f"{name:12} FAILED: {type(error).__name__}: {message}", flush=True)
        finally:
            torch.compiler.reset()
            gc.collect()
            if self.setting.device.type == "cuda":
                torch.cuda.empty_cache()

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": [asdict(row) for row in self.rows],
            "failures": [asdict(failure) for failure in self.failures],
            "seconds": self.took,
        }
