"""What a form says of itself is asked for by notes, given plans and costs; a form that they do not know stands for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.fx import Graph, Node

from fxprec.errors import PlanError
from fxprec.numerics.formats import E4M3FN
from fxprec.passes.analysis.ways import Demand
from fxprec.passes.choose_crossings import _remark
from fxprec.passes.crossings import given_plan
from fxprec.passes.crossings.costs import Rates
from fxprec.passes.crossings.needs import Needs
from fxprec.passes.forms.host import OnHost
from fxprec.passes.forms.low import Low
from fxprec.passes.forms.own import Own
from fxprec.plan import Site


@dataclass(frozen=True)
class Thin(Low):
    """A copy that is read by weight gradients alone."""

    serves = frozenset({Demand.READ_LOW})
    counted = "in rank 8"
    error = 1.0

    def matches_row(self, site: Site) -> bool:
        return cast("str", site.way) == "thin" and site.promoted_at is None


THIN = Thin(E4M3FN)
SITE = Site(
    id=0, tensor="x", kind="output", module="", shape="8", group=0, format="e4m3fn", direction="forward",
    way=cast("Any", "thin"),
)  # fmt: skip


@pytest.fixture
def node() -> Node:
    node = Graph().placeholder("x")
    node.meta["val"] = torch.empty(8, 8)
    return node


def needs(**fields: Any) -> Needs:
    return Needs(cast("Any", SimpleNamespace(undecoded=lambda n: n, decoded=())), **fields)


def test_a_given_plan_asks_the_forms_for_a_way_of_any_name(node: Node) -> None:
    both = needs(forms={node: (Own(), THIN)})
    assert given_plan._form_of(both, node, SITE) == THIN
    assert given_plan._form_of(both, node, replace(SITE, promoted_at=3)) == Own()
    with pytest.raises(PlanError, match=r"sites\[0\]\.way \(x\) of the given plan is 'thin', and backward reads"):
        given_plan._form_of(needs(forms={node: (Own(),)}), node, SITE)


def test_nothing_is_computed_again_from_a_form_that_does_not_bear_it(node: Node) -> None:
    again = node.graph.call_function(torch.relu, (node,))
    given_plan._refuse_sources(needs(), again, {node: Low(E4M3FN)})
    with pytest.raises(PlanError, match="keeps x in rank 8, and recomputes relu from it"):
        given_plan._refuse_sources(needs(), again, {node: THIN})


def test_a_form_of_a_larger_error_costs_more(node: Node) -> None:
    rates = Rates(bytes_per_s=1e9, flop_per_s=1e9)
    assert rates.encoding(node, THIN) > 5 * rates.encoding(node, Low(E4M3FN))
    assert rates.encoding(node, OnHost(THIN)) == rates.encoding(node, THIN)


def test_the_note_counts_every_form() -> None:
    forms = dict(enumerate((Own(), THIN, THIN, OnHost(Low(E4M3FN)))))
    fit = SimpleNamespace(replay=SimpleNamespace(kept=forms, repeated=()))
    assert _remark(needs(), cast("Any", fit)) == (
        "peak budget: 1 values are kept, 0 kept in 8 bits, 1 in host memory, 2 in rank 8, 0 recomputed in backward"
    )
