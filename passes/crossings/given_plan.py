"""Follow the choice in a given plan: the way that each value had when the plan was made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch.fx import Node

from fxprec.errors import PlanError
from fxprec.passes.analysis.replay.replay import Replay
from fxprec.passes.analysis.ways import Demand, Form
from fxprec.passes.base import GivenPeak, Work
from fxprec.passes.crossings.costs import Rates
from fxprec.passes.crossings.moments import Fit
from fxprec.passes.crossings.needs import Needs
from fxprec.passes.crossings.overlap import overlap
from fxprec.passes.forms.host import OnHost
from fxprec.plan.rows import PeakBytes, Site


def as_given(work: Work, needs: Needs, given: GivenPeak) -> tuple[Fit, PeakBytes]:
    """Return the choice of a plan's ways. Raises `PlanError` if they leave out a value that backward needs."""
    kept: dict[Node, Form] = {}
    nodes = {row: node for node, row in needs.rows.items()}
    for site in given.sites:
        node = nodes.get(site.id, work.book.values.get(site.id))
        if node in needs.forms and site.way not in ("", "recompute"):
            kept[node] = _form_of(needs, node, site)
    names, moved = frozenset(given.peak.kept), frozenset(given.peak.offloaded)
    for node, (own, *others) in needs.forms.items():
        if node.name in moved:
            kept[node] = _moved(others, f"peak_bytes.offloaded ({node.name})")
        elif node.name in names:
            kept[node] = own
    replay = Replay(needs.step, kept)
    for node, _ in replay.repeated:
        if node not in needs.step.decoded and not needs.can_repeat(node):
            raise PlanError(
                f"the given plan leaves out {node.name}, which backward needs and which cannot be recomputed; give "
                "its site the way 'keep', or plan again"
            )
        _refuse_sources(needs, node, kept)
    overlap(replay, Rates.of(work.joint.device), work.peak_part.bound(given.peak.budget).peak)
    fit = Fit(replay, kept, 0.0)
    return fit, replace(given.peak, planned=fit.peak, waiting=fit.waiting, live=replay.live_by_kind())


def _form_of(needs: Needs, node: Node, site: Site) -> Form:
    """Return the form that a row of a given plan names. Raises `PlanError` if the value cannot have it."""
    found, is_promoted = [f for f in needs.forms[node] if f.matches_row(site)], site.promoted_at is not None
    entry = f"sites[{site.id}].way ({site.tensor})"
    if site.way == "offload":
        if site.saved_as and not is_promoted:
            raise PlanError(_cannot_move(entry, f"in {site.saved_as} it stays on the device"))
        return _moved(found, entry)
    name, entered = site.form or site.saved_as, "form" if site.form else "saved_as"
    if site.way == "narrow" and name and not is_promoted and all(form.way != name for form in found):
        why = needs.refused.get(node, {}).get(name, "backward also reads the value itself")
        raise PlanError(
            f"sites[{site.id}].{entered} ({site.tensor}) of the given plan is {name!r}: {name} cannot hold it: {why}; "
            f"take {entered} out, or plan again"
        )
    if not found:
        raise PlanError(
            f"{entry} of the given plan is {site.way!r}, and backward reads the value in a way that this does not "
            "serve; give it the way 'keep', or plan again"
        )
    return found[-1]  # the last: a copy is preferred to the value itself


def _moved(forms: Iterable[Form], entry: str) -> Form:
    """Return the form in host memory. Raises `PlanError` if the value cannot wait there."""
    found = [form for form in forms if form.is_on_host]
    if not found:
        raise PlanError(_cannot_move(entry, OnHost.missing))
    return found[-1]


def _cannot_move(entry: str, why: str) -> str:
    return f"{entry} of the given plan is 'offload', and {why}; give it the way 'keep', or plan again"


def _refuse_sources(needs: Needs, repeated: Node, kept: Mapping[Node, Form]) -> None:
    """Raise `PlanError` if a given plan recomputes a value from a form that does not tolerate it."""
    for source in map(needs.step.undecoded, repeated.all_input_nodes):
        form = kept.get(source)
        if form is not None and Demand.RECOMPUTE_LOW not in form.serves and repeated not in needs.step.decoded:
            kept_as = f"in {form.way}" if form.way else form.counted
            raise PlanError(
                f"the given plan keeps {source.name} {kept_as}, and recomputes {repeated.name} from it, whose error "
                "would not average out; keep one of the two in 8 bits or more"
            )
