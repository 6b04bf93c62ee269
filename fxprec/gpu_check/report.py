"""The report of ``fxprec gpu-check``: a verdict per item, JSON, and a text to paste into an issue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxprec.gpu_check.findings import Findings
from fxprec.gpu_check.items import Item

if TYPE_CHECKING:
    from rich.table import Table

MAX_LINES, WIDTH = 40, 150  # of the text
_WORDS = {"passed": "pass", "failed": "FAIL", "skipped": "skipped"}


@dataclass(frozen=True)
class Report:
    """The report on all items that ran. ``seconds`` is the time from the start to the verdict."""

    items: tuple[Item, ...]
    findings: tuple[Findings, ...]
    seconds: float
    dry: bool

    @property
    def has_passed(self) -> bool:
        """Return whether something ran and nothing failed."""
        return bool(self.findings) and all(f.status != "failed" for f in self.findings)

    def of(self, item: Item) -> tuple[Findings, ...]:
        """Return an item's findings, one per mode."""
        return tuple(f for f in self.findings if f.item == item.name)

    def verdict(self, item: Item) -> str:
        """Return ``"pass"``, ``"FAIL"`` or ``"skipped"``."""
        statuses = [f.status for f in self.of(item)]
        return _WORDS[next((s for s in ("failed", "passed") if s in statuses), "skipped")]

    def to_dict(self) -> dict[str, object]:
        """Return all findings, for the JSON file."""
        return {
            "schema": 1,
            "passed": self.has_passed,
            "dry": self.dry,
            "seconds": round(self.seconds, 1),
            "machine": self.machine,
            "items": [f.to_dict() for f in self.findings],
        }

    @property
    def machine(self) -> dict[str, Any]:
        """Return the facts of item ``machine``."""
        return next((f.facts for f in self.findings if f.item == "machine"), {})

    def summary(self, item: Item) -> str:
        """Return in one line what an item checked, and what failed."""
        found = self.of(item)
        failed = [f"{f['case']}: {f['why']}" for one in found for f in one.failed]
        if failed:
            more = f" (and {len(failed) - 1} more)" if failed[1:] else ""
            return failed[0] + more
        parts = [_counted(one) for one in found if one.passed]
        left = [f"{entry['what']}: {entry['why']}" for one in found for entry in one.left_out]
        if self.verdict(item) == "skipped":
            return "; ".join(left) or "nothing to check"
        return ", ".join(parts) + (f"; not checked: {'; '.join(left)}" if left else "")

    def table(self) -> Table:
        """Return the verdicts as a table for the terminal."""
        from rich.markup import escape

        from fxprec.console import columns

        table = columns(("item", "verdict", "s", "checked"), ())
        for item in self.items:
            seconds = f"{sum(one.seconds for one in self.of(item)):.1f}"
            table.add_row(item.title, self.verdict(item), seconds, escape(self.summary(item)))
        return table

    def text(self) -> str:
        """Return at most `MAX_LINES` lines: the machine, a line per item, causes of failures, figures, the verdict."""
        lines = [*self._head(), *(self.line(item) for item in self.items)]
        details = [*self._failures(), *self._figures()]
        room = MAX_LINES - len(lines) - 1
        if len(details) > room:
            details = [*details[: room - 1], f"({len(details) - room + 1} lines more in the JSON file)"]
        return "\n".join(line[:WIDTH] for line in [*lines, *details, self.last_line])

    @property
    def last_line(self) -> str:
        """Return in one line the verdict and the seconds until it."""
        failed = [item.name for item in self.items if self.verdict(item) == "FAIL"]
        verdict = "all passed" if self.has_passed else f"FAILED: {', '.join(failed) or 'nothing ran'}"
        return f"{verdict}{' (dry run)' if self.dry else ''}; {self.seconds:.0f} s to the verdict"

    def _head(self) -> list[str]:
        versions = self.machine.get("versions", {})
        gpu = self.machine.get("gpu")
        where = "without a GPU (--dry)" if self.dry else "GPU unknown: item 'machine' did not say"
        if gpu:
            where = shown_gpu(gpu)
        return [f"fxprec gpu-check: {where}", "  ".join(f"{name} {value}" for name, value in versions.items())]

    def line(self, item: Item) -> str:
        """Return verdict, name, seconds and summary of an item."""
        seconds = sum(one.seconds for one in self.of(item))
        return f"{self.verdict(item):7} {item.name:11} {seconds:5.1f} s  {self.summary(item)}"

    def _failures(self) -> list[str]:
        """Return the failures that an item's line leaves out, and the ends of tracebacks."""
        lines = []
        for item in self.items:
            failed = [f for one in self.of(item) for f in one.failed]
            lines += [f"  {item.name}, {f['case']}: {f['why']}" for f in failed[1:]]
            lines += (
                [f"    {line.strip()}" for line in failed[0]["detail"].strip().splitlines()[-4:-1]] if failed else []
            )
        return lines

    def _figures(self) -> list[str]:
        return [
            f"  {one.item}, {name}: {value}"
            for one in self.findings
            if one.item != "machine"
            for name, value in one.facts.items()
        ]


def shown_gpu(gpu: Mapping[str, Any]) -> str:
    """Return the facts of `machine.gpu` in one line."""
    size, mig = gpu["memory_bytes"] / 2**30, ", MIG" if gpu["mig"] else ""
    return f"{gpu['gpus']} x {gpu['name']}, sm_{gpu['sm']}, {size:.0f} GiB{mig}, driver {gpu['driver']}"


def _counted(found: Findings) -> str:
    number = len(found.passed)
    if found.mode == "compiled":
        return f"compiled for {', '.join(found.passed)}"
    return f"{number} case{'s' if number > 1 else ''}{'' if found.mode == 'gpu' else ' on the CPU'}"


def progress(items: Sequence[Item], item: Item, findings: Findings, seconds: float) -> str:
    """Return the line that is shown while an item runs."""
    at = f"{items.index(item) + 1}/{len(items)} {item.title}"
    return f"[{seconds:3.0f} s] {at}: {findings.case or 'starting'} ({findings.mode})"
