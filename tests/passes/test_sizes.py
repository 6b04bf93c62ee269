"""Sizes under dynamic shapes: orders and budgets against counting through all sizes."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
import sympy
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._sympy.functions import FloorDiv

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from counted_tensors import tensor
from helpers import eager_backend
from models import Parts

from fxprec.errors import FallbackError, FxprecWarning
from fxprec.passes.analysis.sizes import Range, budget_note, order_notes

s0, s1 = sympy.symbols("s0 s1", positive=True, integer=True)
SEQUENCE = {s0: Range(2, None, 16)}


def grouped(*sizes: sympy.Expr) -> dict:
    return {g: [tensor(g, "output", g, 1, size=sympy.sympify(size))] for g, size in enumerate(sizes)}


def notes(order: list[int], *sizes: sympy.Expr, ranges=SEQUENCE, **options: bool) -> list[str]:
    return order_notes(order, grouped(*sizes), ranges, **options)


def test_an_order_that_flips_says_from_where_on():
    assert notes([0, 1], 1024 * s0, 8 * s0**2) == [
        "order of groups 0 and 1 depends on s0: group 1 is larger from s0 = 129 on"
    ]
    assert notes([1, 0], 1024 * s0, 8 * s0**2, ranges={s0: Range(2, None, 200)}) == [
        "order of groups 0 and 1 depends on s0: group 0 is larger up to s0 = 127"
    ]
    assert notes([1, 0], 1024 * s0, 8 * s0**2, ascending=True, ranges={s0: Range(2, None, 64)}) == [
        "order of groups 0 and 1 depends on s0: group 0 is smaller from s0 = 129 on"
    ]


def test_an_order_that_holds_for_all_sizes_is_no_note():
    assert notes([1, 0], 512 * s0, 512 * s0 + 64) == []
    assert notes([0, 1], 1024 * s0, 8 * s0**2, ranges={s0: Range(2, 128, 16)}) == [], "the guards end before it flips"
    assert notes([0, 1], 100, 60) == []
    assert notes([0, 1], 100, 60, ranges={}) == []


def test_a_batch_that_all_terms_share_does_not_count():
    ranges = {s0: Range(2, None, 4), s1: Range(2, None, 16)}
    assert notes([0, 1], 64 * s0 * s1, 2 * s0 * s1**2, ranges=ranges) == [
        "order of groups 0 and 1 depends on s1: group 1 is larger from s1 = 33 on"
    ]
    assert notes([0, 1], 64 * s0 * s1, 2 * s1**2 + s0, ranges=ranges) == [
        "order of groups 0 and 1 depends on s1: group 1 is larger from s1 = 128 on where s0 = 4"
    ]


def test_an_order_that_flips_only_where_two_sizes_change_is_said_to_be_as_traced():
    ranges = {s0: Range(2, 8, 4), s1: Range(2, 16, 16)}
    assert notes([0, 1], 64 * s0 * s1, s0 + 1200, ranges=ranges | {s1: Range(6, 16, 16)}) == [
        "order of 1 pairs of groups is that of the traced sizes: s0 = 4, s1 = 16"
    ]


def test_what_is_no_polynomial_is_compared_too():
    assert notes([0, 1], 64 * s0, 9 * sympy.floor(s0 / 2)) == []
    assert notes([0, 1], 64 * s0, 8 * sympy.floor(s0**2 / 2)) == [
        "order of groups 0 and 1 depends on s0: group 1 is larger from s0 = 17 on"
    ]
    assert notes([0, 1], 64 * s0, 2 * FloorDiv(s0, 3) ** 2) == [
        "order of groups 0 and 1 depends on s0: group 1 is larger from s0 = 291 on"
    ]


def test_a_size_of_unknown_range_is_said_to_be_as_traced():
    assert notes([0, 1], 64 * s0, s0 * s1) == ["order of 1 pairs of groups is that of the traced sizes: s0 = 16"]
    note = budget_note(10_000, "b", 64 * s0 + s1, SEQUENCE)
    assert note.text == "activation_budget b holds at the traced sizes: s0 = 16"
    assert budget_note(10_000, "b", s1, SEQUENCE) is None


def test_many_flips_are_summed_up():
    sizes = [1000 + g * s0 for g in range(40, 0, -1)]
    found = notes(list(range(39, -1, -1)), *sizes)
    assert len(found) == 9
    assert found[-1] == "so does the order of 31 more pairs of groups"


def brute(text: str) -> set[int]:
    """Read the sizes of 2 to 60 that a note names."""
    found: set[int] = set()
    for part in text.split(" and "):
        numbers = [int(n) for n in re.findall(r"(?<!s)\d+", part)]
        if part.startswith("up to"):
            found |= set(range(2, numbers[0] + 1))
        elif part.endswith("on"):
            found |= set(range(numbers[0], 61))
        else:
            found |= set(range(numbers[0], numbers[-1] + 1))
    return found


coefficients = st.lists(st.integers(-40, 40), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(coefficients, st.sampled_from([60, None]))
def test_flips_are_those_of_counting(terms, most):
    assume(any(terms[1:]))
    difference = sum(c * s0**i for i, c in enumerate(terms))
    wanted = {n for n in range(2, 61) if sum(c * n**i for i, c in enumerate(terms)) > 0}
    found = notes([0, 1], 0, difference, ranges={s0: Range(2, most, 16)})
    assert (brute(found[0].partition("larger ")[2]) & set(range(61)) if found else set()) == wanted


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, 30), min_size=3, max_size=3), st.integers(0, 40_000))
def test_budgets_are_those_of_counting(terms, budget):
    size = sum(c * s0**i for i, c in enumerate(terms)) + 1
    fits = {n for n in range(2, 61) if size.subs(s0, n) <= budget}
    note = budget_note(budget, "b", size, {s0: Range(2, 60, 16)})
    if len(fits) == 59 or not terms[1] + terms[2]:
        assert note is None
    else:
        assert note.is_broken
        assert brute(note.text.removeprefix("activation_budget b holds ")) == fits if fits else "nowhere" in note.text


def test_a_budget_without_a_largest_size_is_a_note_alone():
    note = budget_note(10_000, "9.77 KiB", 64 * s0 + 8 * s0**2, SEQUENCE)
    assert (note.text, note.is_broken) == ("activation_budget 9.77 KiB holds up to s0 = 31", False)
    both = {s0: Range(2, None, 4), s1: Range(2, 100, 16)}
    words = "activation_budget b holds up to s0 = 6 where s1 = 16; up to s1 = 25 where s0 = 4"
    assert budget_note(1000, "b", 10 * s0 * s1, both).text == words
    assert budget_note(1000, "b", sympy.Integer(2000), both) is None


def test_two_hundred_groups_cost_little():
    ranges = {s0: Range(2, None, 4), s1: Range(2, None, 128)}
    kinds = [s0 * s1 * 768, s0 * s1 * 3072, s0 * s1**2 * 12, sympy.Integer(768 * 3072)]
    groups = {
        g: [tensor(20 * g + i, "output", g, 1, size=kinds[(g * i) % 4] * (g % 7 + 1)) for i in range(20)]
        for g in range(200)
    }
    start = time.process_time()
    order_notes(list(groups), groups, ranges)
    assert time.process_time() - start < 2


def attention() -> nn.Module:
    """(batch, sequence, 8) to the same: scores that grow with the square of the sequence, beside a wide layer."""
    layers = {"up": nn.Linear(8, 64), "down": nn.Linear(64, 8)}
    return Parts(lambda m, x: m.down(m.up(x).relu()) * (torch.softmax(x @ x.transpose(1, 2), -1) @ x), **layers)


def train(*, most: int | None = None, storage: str = "native", **options: object):
    torch._dynamo.reset()
    backend = eager_backend("fp8", storage=storage, **options)
    x = torch.randn(2, 12, 8)
    torch._dynamo.mark_dynamic(x, 1, **({} if most is None else {"min": 2, "max": most}))
    torch.compile(attention(), backend=backend)(x).sum().backward()
    return backend.plans[0]


def test_a_plan_says_at_which_sequence_length_its_order_changes():
    plan = train(low_ratio=0.5)
    sizes = {g.id: sympy.sympify(g.size) for g in plan.groups}
    words = r"order of groups (\d+) and (\d+) depends on (s\d+): group (\d+) is larger from s\d+ = (\d+) on"
    (found,) = filter(None, (re.fullmatch(words, note) for note in plan.notes))
    pair, symbol, larger, at = {int(found[1]), int(found[2])}, found[3], int(found[4]), int(found[5])
    (other,) = pair - {larger}
    assert sizes[larger].subs(symbol, at) > sizes[other].subs(symbol, at)
    assert sizes[larger].subs(symbol, at - 1) <= sizes[other].subs(symbol, at - 1)


def test_a_budget_under_dynamic_shapes_says_up_to_where_it_holds():
    saved = train(low_ratio=1.0).saved_bytes.planned
    budget = saved + 2000
    (note,) = (n for n in train(low_ratio=None, activation_budget=budget).notes if n.startswith("activation_budget"))
    most = int(re.search(r"holds up to s\d+ = (\d+)$", note)[1])
    assert most >= 12
    fits = train(low_ratio=None, activation_budget=budget, most=most)
    assert not any(n.startswith("activation_budget") for n in fits.notes)
    with pytest.warns(FxprecWarning, match=rf"activation_budget .* holds up to s\d+ = {most}$"):
        train(low_ratio=None, activation_budget=budget, most=most + 1)
    with pytest.raises(Exception, match=r"holds up to") as refused:
        train(low_ratio=None, activation_budget=budget, most=most + 1, strict=True)
    assert FallbackError.__name__ in repr(refused.value)


def test_the_budget_of_a_simulation_is_that_of_what_codes_would_take():
    saved = train(low_ratio=1.0, storage="simulate").saved_bytes
    budget = 3000
    plan = train(low_ratio=None, activation_budget=budget, storage="simulate")
    assert plan.saved_bytes.planned >= saved.planned
    (note,) = (n for n in plan.notes if n.startswith("activation_budget"))
    assert int(re.search(r"holds up to s\d+ = (\d+)$", note)[1]) >= 12
    with pytest.warns(FxprecWarning, match=r"activation_budget .* holds up to"):
        train(low_ratio=None, activation_budget=budget, storage="simulate", most=1000)


def warm() -> nn.Module:
    """Two layers, and a factor made of an int that changes from step to step."""
    return Parts(lambda m, x, step: m.b(m.a(x).relu()) * (step * 0.1), a=nn.Linear(64, 64), b=nn.Linear(64, 64))


@pytest.mark.parametrize("options", [{}, {"peak_budget": "100%"}, {"activation_budget": 40_000}])
@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_an_int_that_changes_is_no_size(recipe: str, options: dict[str, object]) -> None:
    """torch gives the int of forward no bounds, neither above nor below."""
    model, backend = warm(), eager_backend(recipe, **options)
    step = torch.compile(model, backend=backend)
    for i in (1, 2, 5, -3):
        x = torch.randn(64, 64)
        out = step(x, i)
        out.sum().backward()
        assert torch.allclose(out, model(x, i), atol=0.02)
    assert len(backend.plans) == 2, "one for the int as a constant, one for all others"
    assert not [note for plan in backend.plans for note in plan.notes if "depends on" in note or "traced" in note]


def test_a_slice_up_to_an_int_has_a_size_without_bounds() -> None:
    endless = {s0: Range(-(2**48), None, -2)}
    assert notes([0, 1], 256 * s0 + 24704, 128 * s0 + 8194, ranges=endless) == [
        "order of groups 0 and 1 depends on s0: group 1 is larger up to s0 = -129"
    ]
    assert notes([0, 1], s0**2 + 1, 0, ranges=endless) == []
    model, backend = warm(), eager_backend("fp8", activation_budget=10_000)
    torch._dynamo.reset()
    step = torch.compile(lambda x, n: model(x[:n], 1).sum(), backend=backend)
    step(torch.randn(64, 64), 3).backward()
    with pytest.warns(FxprecWarning, match=r"activation_budget .* holds up to s\d+ = \d+$"):
        step(torch.randn(64, 64), 20).backward()


def test_a_jagged_dimension_is_no_size() -> None:
    """It stands for a tensor of lengths, and torch knows no range of it."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    found = torch.compile(model, backend="fxprec", options={"recipe": "fp8", "lowering": "eager"})(x)
    found.values().square().mean().backward()
    assert torch.equal(found.values(), model(x).values())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
