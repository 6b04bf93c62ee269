"""Recommends options that keep the gradients' error below a tolerance, with what they save and cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fxprec.diagnosis.adjoint import combined
from fxprec.diagnosis.rounding import bits_of
from fxprec.diagnosis.rows import GemmRow, Row
from fxprec.numerics.blocks import NAMED, find_blocks
from fxprec.numerics.formats import Format
from fxprec.passes.analysis.knapsack import min_damage_cover
from fxprec.passes.analysis.selection import OUTERMOST, covers
from fxprec.report.result import plain

TOLERANCE = 0.1  # about 0.995 of cosine: the most that 50 architectures lose in bf16 (docs/policies.md)
WORTHWHILE = 0.25  # of the bytes that all low would save; if less is saved, 16 bits are the simpler answer


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Options to paste, with the reason. Bytes are bytes saved for backward."""

    options: Mapping[str, Any]
    reason: str
    predicted: float
    """Predicted damage of the step with these options."""
    bytes_all_high: int
    bytes_as_planned: int
    bytes_recommended: int
    stored: Mapping[int, str] = field(default_factory=dict, repr=False)
    """Formats that differ from the plan, by the position of their row."""

    @property
    def holds_high(self) -> bool:
        """Whether some tensors are stored otherwise than planned; if not, the plan can stay."""
        return bool(self.stored)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {name: value for name, value in plain(self).items() if name != "stored"}


@dataclass(frozen=True)
class Remedy:
    """Options to train with, and the formats that then differ from the plan."""

    options: Mapping[str, Any]
    stored: Mapping[int, str]
    said: str


@dataclass(frozen=True)
class Case:
    """The rows as planned, and the damage and bytes that a remedy would give them."""

    rows: Sequence[Row]
    hi: Format
    base: Mapping[str, Any]
    tolerance: float

    @property
    def low(self) -> list[int]:
        """Return the positions of rows that have fewer bits than the high format."""
        return [i for i, row in enumerate(self.rows) if bits_of(row.format) < self.hi.bits]

    def damage(self, stored: Mapping[int, str]) -> float:
        """Return the predicted damage of the whole step."""
        return combined(self._damage(i, stored) for i in range(len(self.rows)))

    def _damage(self, i: int, stored: Mapping[int, str]) -> float:
        row = self.rows[i]
        return row.costs[stored[i]].damage if i in stored else row.damage

    def bytes(self, stored: Mapping[int, str]) -> int:
        """Return the bytes of all rows, with the formats in ``stored`` for the rows listed there."""
        sizes = (row.elements * bits_of(stored.get(i, row.format)) for i, row in enumerate(self.rows))
        return sum(int(size) // 8 for size in sizes)

    @property
    def all_high(self) -> dict[int, str]:
        """Return the formats that store every low row in the high format."""
        return dict.fromkeys(self.low, self.hi.name)

    def in_blocks(self) -> list[Remedy]:
        """Return a remedy for each tried block format of 8 bits, which gives each block a scale."""
        recipe = self.base.get("recipe")
        if not isinstance(recipe, str) or "+" in recipe or "plan" in self.base:
            return []
        may = [i for i in self.low if self.rows[i].may_have_blocks]
        formats = [f for f in (self.rows[0].costs if may else ()) if "/" in f or f in NAMED]
        return [
            Remedy({**self.base, "recipe": f"{recipe}+{f}"}, dict.fromkeys(may, f), "with a scale for each block")
            for f in formats
            if find_blocks(f).bits == 8
        ]

    def modules_high(self) -> Remedy | None:
        """Keep modules high, first those that remove most damage per byte; None if all modules high do too much damage.

        A greedy cover: damages combine as a sum of squares, so the removed damage does too. Modules that later ones
        make unnecessary are removed from the list again.
        """
        patterns = self._enough()
        if patterns is None:
            return None
        for pattern in tuple(patterns):
            rest = [p for p in patterns if p != pattern]
            if self.damage(self._held(rest)) <= self.tolerance:
                patterns = rest
        held = self.base.get("keep_high", ())
        more = () if held == "ends" else tuple(held)
        options = {**self.base, "keep_high": (*more, *patterns)}
        return Remedy(options, self._held(patterns), "with these modules high")

    def _enough(self) -> list[str] | None:
        modules = sorted({self.rows[i].module or OUTERMOST for i in self.low})
        covered = {m: {i for i in self.low if covers(m, self.rows[i].module)} for m in modules}
        gain = {i: self._gain(i) for i in self.low}
        patterns, stored = list[str](), dict[int, str]()
        while self.damage(stored) > self.tolerance:
            worth = {m: self._worth(covered[m] - stored.keys(), gain) for m in modules}
            best = max(modules, key=worth.__getitem__, default=None)
            if best is None or worth[best] <= 0:
                return None
            patterns.append(best)
            stored |= dict.fromkeys(covered[best], self.hi.name)
        return patterns

    def _held(self, patterns: Sequence[str]) -> dict[int, str]:
        held = (i for i in self.low if any(covers(p, self.rows[i].module) for p in patterns))
        return dict.fromkeys(held, self.hi.name)

    def _gain(self, i: int) -> float:
        """Return the squared damage that the high format removes from a row; 0 if it does as much, infinite or not."""
        low, high = self.rows[i].damage, self._damage(i, {i: self.hi.name})
        return low * low - high * high if low > high else 0.0

    def _worth(self, rows: Iterable[int], gain: Mapping[int, float]) -> float:
        """Return the gain per additional bit."""
        some = tuple(rows)
        bits = math.fsum(self.rows[i].elements * (self.hi.bits - bits_of(self.rows[i].format)) for i in some)
        return math.fsum(gain[i] for i in some) / max(bits, 1.0)


def gemms_to_hold(rows: Sequence[GemmRow], share: float) -> list[str]:
    """Return the modules whose GEMMs to keep high: those that do most damage, with at most a share of all weights.

    Damages of GEMMs combine as a sum of squares, so the GEMMs that stay low are a cover of least damage.
    """
    modules = list(dict.fromkeys(row.module for row in rows))
    elements = [sum(row.elements for row in rows if row.module == module) for module in modules]
    damages = [math.fsum(row.damage**2 for row in rows if row.module == module) for module in modules]
    cover = min_damage_cover(elements, damages, math.ceil((1 - share) * sum(elements)))
    assert cover is not None, "all of them low are enough"
    return [module or OUTERMOST for i, module in enumerate(modules) if i not in set(cover.chosen)]


def hold_gemms(advice: Advice, rows: Sequence[GemmRow], share: float) -> Advice:
    """Add to the options the modules whose GEMMs to keep high."""
    held = advice.options.get("keep_high", ())
    if not rows or held == "ends":
        return advice
    more = [module for module in gemms_to_hold(rows, share) if module not in held]
    if not more:
        return advice
    left = combined(row.damage for row in rows if (row.module or OUTERMOST) not in more)
    whole = combined(row.damage for row in rows)
    said = f"GEMMs with at most {share:.0%} of the weights high: their damage is {left:.2g}, {whole:.2g} with none"
    return replace(advice, options={**advice.options, "keep_high": (*held, *more)}, reason=f"{advice.reason}; {said}")


def advise(rows: Sequence[Row], hi: Format, base: Mapping[str, object], tolerance: float = TOLERANCE) -> Advice:
    """Return the options that save most within the tolerance: as planned, in blocks, with modules high, or wide."""
    case = Case(rows, hi, base, tolerance)
    remedy = _chosen(case)
    return Advice(
        options=remedy.options,
        reason=remedy.said,
        predicted=case.damage(remedy.stored),
        bytes_all_high=case.bytes(case.all_high),
        bytes_as_planned=case.bytes({}),
        bytes_recommended=case.bytes(remedy.stored),
        stored=remedy.stored,
    )


def _chosen(case: Case) -> Remedy:
    whole = case.damage({})
    if not case.low:
        return Remedy(case.base, {}, "nothing is stored low: there is nothing to gain or to lose")
    if whole <= case.tolerance:
        return Remedy(
            case.base, {}, f"gradients are off by {whole:.2g}, below {case.tolerance:g}: all tensors may be low"
        )
    by_module = case.modules_high()
    tried = [*case.in_blocks(), *([by_module] if by_module else [])]
    good = [remedy for remedy in tried if case.damage(remedy.stored) <= case.tolerance]
    best = min(good, key=lambda remedy: case.bytes(remedy.stored), default=None)
    high = case.bytes(case.all_high)
    saved = 0.0 if best is None else (high - case.bytes(best.stored)) / max(high - case.bytes({}), 1)
    if best is not None and saved >= WORTHWHILE:
        said = f"gradients are off by {whole:.2g} as planned, by {case.damage(best.stored):.2g} {best.said}"
        return replace(best, said=said)
    return _wide(case, whole, saved)


def _wide(case: Case, whole: float, saved: float) -> Remedy:
    left = case.damage(case.all_high)
    if left > case.tolerance:
        said = f"in {case.hi.name} alone gradients are off by {left:.2g}, above {case.tolerance:g}"
        return Remedy({"recipe": "fp32"}, case.all_high, f"stay in float32: {said}")
    why = f"only {saved:.0%} of the bytes that 8 bits would save are saved once the necessary modules are held high"
    said = f"stay in bf16: gradients would be off by {whole:.2g}, and {why}"
    return Remedy({"recipe": "bf16"}, case.all_high, said)
