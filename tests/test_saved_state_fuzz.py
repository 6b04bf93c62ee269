"""A saved state is a file like any other: what is wrong with it is named, and nothing is half loaded."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from backend_helpers import eager_backend, mlp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fxprec


@pytest.fixture(scope="module")
def trained() -> tuple[fxprec.Backend, Any, list[Any]]:
    """A backend whose state has scales: in simulation all gradients are rounded, and scaled."""
    torch.compiler.reset()
    torch.manual_seed(0)
    backend = eager_backend("simulate", recipe="hfp8", low_ratio=1.0)
    compiled = torch.compile(mlp(), backend=backend)
    for _ in range(2):
        compiled(torch.randn(4, 16)).square().mean().backward()
    return backend, compiled, json.loads(backend.state_dict()["graphs"])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def changed(graphs: list[Any], place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    found = copy.deepcopy(graphs)
    at: Any = found
    for key in place[:-1]:
        at = at[key]
    if value is ...:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    return found


garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=3,
)


@settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.data())
def test_any_value_anywhere_loads_or_is_an_error_of_ours(trained: Any, data: st.DataObject) -> None:
    backend, compiled, graphs = trained
    # The plan's own entries are fuzzed in test_plan_files; here one of them stands for all.
    known = [p for p in places(graphs) if p[1:2] != ("plan",) or len(p) <= 3]
    where = data.draw(st.sampled_from(known))
    state = {"version": 3, "graphs": changed(graphs, where, data.draw(st.just(...) | garbage) if where else None)}
    if data.draw(st.booleans()):
        state["graphs"] = json.dumps(state["graphs"])
    try:
        backend.load_state_dict(state)
    except fxprec.FxprecError:
        backend.load_state_dict({"version": 3, "graphs": graphs})
    compiled(torch.randn(4, 16)).square().mean().backward()  # what loads can be trained with


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (
            (),
            {},
            r"^the saved state is damaged: its graphs are not a list of states; pass what state_dict\(\) returned$",
        ),
        ((), [1], "its graphs are not a list of states; pass what state_dict"),
        ((0,), 3, "its graphs are not a list of states"),
        ((0, "plan"), ..., r"graphs\[0\]: has no 'plan'; pass what state_dict\(\) returned$"),
        ((0, "step"), -1, r"graphs\[0\]\.step: is -1; it must be an int from 0 to 2\*\*53"),
        ((0, "step"), "many", r"graphs\[0\]\.step: is 'many'; it must be an int"),
        ((0, "plan", "sites", 0, "format"), "bf61", r"graphs\[0\]\.plan\.sites\[0\]\.format: .*bf61"),
        ((0, "plan", "schema"), 7, r"graphs\[0\]\.plan\.schema: is 7, and this fxprec reads 1"),
        ((0, "scales", "exps", 0), 0.5, r"graphs\[0\]\.scales\.exps\[0\]: is 0\.5; it must be an int"),
        ((0, "scales", "exps"), [], "the saved state has other scales; load it under the grad_scaling"),
        ((0, "scales", "fresh"), [10**6], "the saved state has other scales"),
        ((0, "scales"), None, "the saved state has other scales"),
    ],
)
def test_a_damaged_entry_is_named(trained: Any, place: tuple[Any, ...], value: Any, words: str) -> None:
    backend, _, graphs = trained
    with pytest.raises(fxprec.PlanError, match=words):
        backend.load_state_dict({"version": 3, "graphs": changed(graphs, place, value)})


NO_LIST, NO_STATE = "its graphs are not a list of states", "^this is not a state of fxprec.Backend version 3"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"version": 2}, NO_LIST),
        ({"version": 3}, NO_LIST),
        ({"version": 3, "graphs": 7}, NO_LIST),
        ({"version": 3, "graphs": "{"}, r"^the saved state is damaged: its graphs are not JSON \(Expecting"),
        ({"version": 3, "graphs": "[" * 100_000}, "its graphs"),
        ({"version": 4, "graphs": "[]"}, NO_STATE),
        *(({}, NO_STATE), (None, NO_STATE), ([], NO_STATE), (3, NO_STATE)),
    ],
)
def test_what_is_no_state_at_all_is_said(trained: Any, state: Any, words: str) -> None:
    with pytest.raises(fxprec.PlanError, match=rf"{words}.*pass what state_dict\(\) returned$") as caught:
        trained[0].load_state_dict(state)
    assert "\n" not in str(caught.value)
