"""The recommendation: what a tensor without a module leaves to choose."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fxprec.diagnosis.advice import advise
from fxprec.diagnosis.page import _heat
from fxprec.diagnosis.rows import Cost, Row
from fxprec.numerics.formats import BF16


def row(site: int, module: str, damage: float) -> Row:
    """A stored tensor of 1,000 elements; in bf16 it does no damage."""

    def cost(fmt: str, damage: float) -> Cost:
        return Cost(format=fmt, damage=damage, progress=0.0, error=damage, overflow=0.0, underflow=0.0, zeros=0.0)

    return Row(
        graph=0, site=site, tensor=f"t{site}", kind="output", module=module, source="", group=0, elements=1000,
        format="e4m3fn", damage=damage, bias=0.0, reason="", planned=cost("e4m3fn", damage), may_have_blocks=False,
        costs={"bf16": cost("bf16", 0.0)},
    )  # fmt: skip


def test_a_tensor_of_the_outermost_forward_has_a_pattern_too():
    rows = [row(0, "", 0.12), row(1, "a", 0.3), row(2, "b", 0.01)]
    found = advise(rows, BF16, {"recipe": "fp8"}, tolerance=0.1)
    assert found.options == {"recipe": "fp8", "keep_high": ("a", ".")}
    assert found.predicted == pytest.approx(0.01)


def test_most_damage_for_the_bytes_comes_first_and_what_is_no_longer_needed_goes():
    rows = [
        replace(row(0, "block", 0.08), elements=6_000),
        *(row(1, "block.a", 0.09), row(2, "block.b", 0.02), row(3, "c", 0.07), row(4, "d", 0.02)),
        replace(row(5, "e", 0.001), elements=20_000),
    ]
    by_tolerance = {t: advise(rows, BF16, {"recipe": "fp8"}, tolerance=t).options["keep_high"] for t in (0.1, 0.08)}
    assert by_tolerance == {0.1: ("block.a", "c"), 0.08: ("block",)}


def test_the_whole_is_wide_where_bf16_does_as_much():
    stuck = replace(row(0, "a", 0.3), costs={"bf16": replace(row(0, "a", 0.3).planned, damage=0.3)})
    assert advise([stuck, row(1, "b", 0.2)], BF16, {"recipe": "fp8"}, tolerance=0.1).options == {"recipe": "fp32"}


def test_a_module_has_the_damage_of_its_tensors_in_every_graph():
    """The heat map took the tensors of two graphs for one if their sites have the same number."""
    found = SimpleNamespace(ranking=(row(0, "a", 0.4), replace(row(0, "a", 0.3), graph=1)), formats=("bf16",))
    assert _heat(found) == [{"module": "a", "damages": [0.5, 0.0]}]
