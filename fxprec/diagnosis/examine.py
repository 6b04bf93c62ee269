"""Examines one graph of a recorded step: what each stored tensor costs, in its own format and in others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor

from fxprec.diagnosis.adjoint import Sensitivity, combined, sensitivities
from fxprec.diagnosis.lab import Cast, Lab, Read, exact
from fxprec.diagnosis.reasons import reason
from fxprec.diagnosis.rounding import as_cast, bias_of, lost, stored_format, to_format
from fxprec.diagnosis.rows import Check, Cost, GemmRow, GroupRow, Row
from fxprec.diagnosis.weights import Gradients
from fxprec.driver.record import RecordedHalf
from fxprec.numerics.blocks import AnyFormat, find
from fxprec.passes.analysis.inputs import GraphInput
from fxprec.plan import Plan, Site


@dataclass
class Examined:
    """One graph with the exact values and gradients of the step."""

    index: int
    plan: Plan
    lab: Lab
    prefix: str
    """Prefix of module names that the graph has and the user's model does not."""
    gradients: Gradients = field(init=False)
    values: Mapping[str, Tensor] = field(init=False)
    sensitivity: Mapping[str, Sensitivity] = field(init=False)
    sites: Mapping[str, Site] = field(init=False)
    """Sites by the name of the cast."""

    @classmethod
    def of(cls, index: int, halves: Mapping[str, RecordedHalf], inputs: Sequence[GraphInput], prefix: str) -> Examined:
        """Run the step without rounding, and differentiate its backward half."""
        forward, backward = halves["forward"], halves["backward"]
        made = forward.compiled
        assert made.plan is not None
        found = cls(index, made.plan, Lab(forward, backward), prefix)
        further = {} if made.scales is None else made.scales.site_of
        found.sites = {
            c.name: found.plan.sites[further.get(c.call.row, c.call.row)]
            for c in found.lab.casts
            if c.reads and c.operand_of is None
        }
        found.gradients = Gradients.of(found.lab.run(), [known.module for known in inputs])
        found.values = found.lab.values(found.sites)
        found.sensitivity = sensitivities(found.lab, found.gradients, found.sites)
        return found

    @property
    def as_planned(self) -> Read:
        """The function that reads copies as the plan stores them."""
        return as_cast(self.lab.table)

    def rows(self, formats: Sequence[str]) -> list[Row]:
        """Return one row per stored tensor, in execution order."""
        by_site: dict[int, list[Cast]] = defaultdict(list)
        for cast in self.lab.casts:
            if cast.name in self.sites:
                by_site[self.sites[cast.name].id].append(cast)
        return [self._row(self.plan.sites[i], casts, formats) for i, casts in sorted(by_site.items())]

    def _row(self, site: Site, casts: Sequence[Cast], formats: Sequence[str]) -> Row:
        first, fmt = casts[0], stored_format(casts[0], site.format)
        planned = self._cost(casts, fmt, self.as_planned)
        x = self.values[first.name].float()
        found = lost(x, self.as_planned(first, x), fmt)
        bias = bias_of(self.lab.table, first, x, fmt)
        return Row(
            graph=self.index,
            site=site.id,
            tensor=site.tensor,
            kind=site.kind,
            module=self._named(site.module),
            source=site.source,
            group=site.group,
            elements=site.elements,
            format=fmt.name,
            damage=planned.damage,
            bias=bias.worst,
            reason=reason(first, site, fmt, found, bias, planned.damage),
            planned=planned,
            may_have_blocks=site.reads == "backward" and not (first.keeps_above or first.keeps_below),
            costs={f: self._cost(casts, find(f), to_format(f)) for f in formats},
        )

    def _named(self, module: str) -> str:
        """Return a module's name in the user's model."""
        return "" if f"{module}." == self.prefix else module.removeprefix(self.prefix)

    def _cost(self, casts: Sequence[Cast], fmt: AnyFormat, read: Read) -> Cost:
        """Return what one tensor costs: the losses of its worst cast, and the damage of all its casts."""
        damages, progress, losses = list[float](), 0.0, []
        for cast in casts:
            x = self.values[cast.name].float()
            got = read(cast, x)
            error = got - x
            known = self.sensitivity.get(cast.name)
            damages.append(math.inf if known is None else known.damage(error))
            progress += 0.0 if known is None else known.change(error)
            losses.append(lost(x, got, fmt))
        worst = max(losses, key=lambda found: found.error)
        return Cost(
            format=fmt.name,
            damage=combined(damages),
            progress=progress,
            error=worst.error,
            overflow=worst.overflow,
            underflow=worst.underflow,
            zeros=worst.zeros,
        )

    def gemms(self) -> list[GemmRow]:
        """Re-run the step for each GEMM with operands in blocks, with only its operands rounded."""
        found = dict.fromkeys(cast.operand_of for cast in self.lab.casts if cast.operand_of is not None)
        rows = []
        for gemm, elements in found:
            returned = self._with_gemms({gemm})
            module = self._named(self.plan.gemms[gemm].module)
            damage, progress = self.gradients.damage(returned), self.gradients.progress(returned)
            rows.append(
                GemmRow(graph=self.index, gemm=gemm, module=module, elements=elements, damage=damage, progress=progress)
            )
        return rows

    def check_gemms(self, name: str, rows: Sequence[GemmRow]) -> Check:
        """Re-run the step with the operands of these GEMMs rounded; predict the damage from their own re-runs."""
        return self._check(name, rows, self._with_gemms({row.gemm for row in rows}))

    def _with_gemms(self, gemms: set[int]) -> list[object]:
        def some(cast: Cast, x: Tensor) -> Tensor:
            is_rounded = cast.operand_of is not None and cast.operand_of[0] in gemms
            return self.as_planned(cast, x) if is_rounded else exact(cast, x)

        return self.lab.run(some)

    def groups(self, rows: Iterable[Row]) -> list[GroupRow]:
        """Return the rows by group, in the plan's order."""
        members: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            members[row.group].append(row)
        return [_group(self.index, group, found) for group, found in sorted(members.items())]

    def run_again(self, name: str, rows: Sequence[Row], formats: Mapping[int, str] = MappingProxyType({})) -> Check:
        """Run the step with only these tensors stored: in the formats given by site, and as planned without one.

        Returns the measured damage beside the predicted one.
        """
        stored = {row.site: formats.get(row.site) for row in rows}
        readers = {f: self.as_planned if f is None else to_format(f) for f in set(stored.values())}

        def some(cast: Cast, x: Tensor) -> Tensor:
            site = self.sites.get(cast.name)
            return exact(cast, x) if site is None or site.id not in stored else readers[stored[site.id]](cast, x)

        costs = [row.planned if (f := stored[row.site]) is None else row.costs[f] for row in rows]
        return self._check(name, costs, self.lab.run(some))

    def _check(self, name: str, costs: Sequence[Cost | GemmRow], returned: Sequence[object]) -> Check:
        """Return the damage of a re-run beside that of its parts."""
        progress = [cost.progress for cost in costs]
        return Check(
            name=name,
            predicted=combined(cost.damage for cost in costs),
            measured=self.gradients.damage(returned),
            predicted_progress=math.fsum(progress) if all(map(math.isfinite, progress)) else -math.inf,
            measured_progress=self.gradients.progress(returned),
        )


def _group(graph: int, group: int, rows: Sequence[Row]) -> GroupRow:
    formats = rows[0].costs
    return GroupRow(
        graph=graph,
        group=group,
        modules=tuple(dict.fromkeys(name for row in rows if (name := row.module or row.source))),
        tensors=len(rows),
        elements=sum(row.elements for row in rows),
        damage=combined(row.damage for row in rows),
        damages={f: combined(row.costs[f].damage for row in rows) for f in formats},
    )
