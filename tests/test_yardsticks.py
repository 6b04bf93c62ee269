"""A fixed part of torch's op_db and module_db in the gate, and the table that is measured with it.

The names are those that were wrong once, and some of each kind. All of op_db: `python -m benchmarks.yardsticks op_db`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import signal
import warnings
from typing import Any

import pytest
import torch

from benchmarks.yardsticks import cells, conditioning, exercise, mixed, module_db, op_db
from benchmarks.yardsticks.kept import summary
from fxprec.ir.operators import measured

WRONG_ONCE = {
    "lgamma": "fp8",  # NaN
    "digamma": "fp8",  # 2e12 times too large
    "polygamma.polygamma_n_1": "fp8",  # infinite
    "special.log_ndtr": "fp8",  # 37 times too large
    "nn.functional.relu6": "fp8",  # half of the gradient was masked: 5.75 is 6 in e4m3fn
    "clamp": "fp8",  # the copy was on the other side of a bound
    "index_select": "bf16",  # ValueError: a place that is one number
    "index_reduce.prod": "bf16",
    "nn.functional.scaled_dot_product_attention": "bf16",  # scores in 16 bits, unnoticed while Dynamo did not compile it
}
OTHERS = {
    "tan": "fp8",
    "linalg.inv": "fp8",
    "nn.functional.silu": "fp8",
    "softmax": "fp8",
    "cumprod": "fp8",
    "nn.functional.conv2d": "fp8",
    "nn.functional.layer_norm": "fp8",
    "nn.functional.embedding": "fp8",
    "scatter_add": "bf16",
    "amax": "near",
    "nn.functional.gelu": "near",
    "logsumexp": "near",
}
MEASURED = ("tanh", "lgamma", "tan", "erfinv", "nn.functional.gelu", "linalg.matrix_power")


@functools.cache
def operators() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # op_db's own
        return {exercise.name_of(op): op for op in exercise.operators()}


@pytest.mark.core  # half a minute
@pytest.mark.parametrize(("name", "recipe"), (WRONG_ONCE | OTHERS).items())
def test_an_operator_of_op_db_is_as_right_as_autocast(name: str, recipe: str) -> None:
    row = op_db.measured(operators()[name], 1, [recipe], seconds=60)
    assert row.samples == 1, row.left_out
    assert row.cells[recipe].verdict == cells.PASSED, row.cells[recipe]


@functools.cache
def modules() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {module.name: module for module in module_db.modules()}


@pytest.mark.parametrize("name", ["nn.Linear", "nn.BatchNorm2d", "nn.MultiheadAttention", "nn.LSTMCell", "nn.Conv1d"])
def test_a_module_of_module_db_is_as_right_as_autocast(name: str) -> None:
    row = op_db.measured(modules()[name], 1, ["fp8"], seconds=60)
    assert row.samples == 1, row.left_out
    assert row.cells["fp8"].verdict == cells.PASSED, row.cells["fp8"]


@pytest.mark.parametrize("name", ["ceil", "copysign", "softmax", "nn.functional.linear"])
def test_an_operator_of_op_db_has_autocasts_gradients_under_autocast(name: str) -> None:
    """`ceil`'s gradient is 0 and depends on no output's: choose-crossings ended in a KeyError."""
    row = op_db.measured(operators()[name], 1, [cells.MIXED], seconds=60)
    assert row.cells[cells.MIXED].verdict == cells.PASSED, row.cells[cells.MIXED]


@pytest.mark.parametrize("side", [mixed.PLAIN_TORCH, None], ids=["torch's", "fxprec's"])
def test_what_a_limit_ends_is_late_on_either_side(side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's own side it was left out, as if torch could not run the operator."""
    stepped = mixed._stepped

    def late(model: Any, backend: Any) -> Any:
        if (backend is mixed.PLAIN_TORCH) == (side is mixed.PLAIN_TORCH):
            signal.raise_signal(signal.SIGALRM)
        return stepped(model, backend)

    monkeypatch.setattr(mixed, "_stepped", late)
    row = op_db.measured(operators()["ceil"], 1, [cells.MIXED], seconds=60)
    assert (row.late, row.left_out, list(row.cells)) == ("longer than 60 s", "", ["eager", "autocast"])
    whole = cells.Row("sin", 1, {cells.MIXED: cells.Cell(), "eager": cells.Cell()})
    found = summary([row, whole])
    assert found[cells.MIXED] == {cells.PASSED: 1, cells.FAILED: 0, cells.REFUSED: 0, cells.LEFT_OUT: 0, cells.LATE: 1}
    assert found["eager"][cells.LATE] == 0


@pytest.mark.parametrize("name", ["nn.LSTMCell", "nn.MultiheadAttention", "nn.Softmax"])
def test_a_module_of_module_db_has_autocasts_gradients_under_autocast(name: str) -> None:
    row = op_db.measured(modules()[name], 1, [cells.MIXED], seconds=60)
    assert row.cells[cells.MIXED].verdict == cells.PASSED, row.cells[cells.MIXED]


def test_what_dynamo_does_not_compile_is_left_out_and_what_it_cuts_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager's numbers are autocast's too, and say nothing of fxprec."""
    row = op_db.measured(modules()["nn.LSTM"], 1, [cells.MIXED], seconds=60)
    assert row.cells[cells.MIXED].note.startswith("fallback: ")
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    row = op_db.measured(operators()["ceil"], 1, [cells.MIXED], seconds=60)
    assert row.cells[cells.MIXED].verdict == cells.LEFT_OUT


def test_an_operator_of_two_results() -> None:
    """It was an AssertionError: two results have no one size."""
    row = op_db.measured(operators()["frexp"], 1, ["bf16"], seconds=60)
    assert row.cells["bf16"].verdict == cells.PASSED


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that lgamma's backward reads in 8 bits, as before there was a table."""
    from fxprec.passes.analysis import sensitive

    monkeypatch.setattr(sensitive, "reasons_high", lambda grouped: {})
    row = op_db.measured(operators()["lgamma"], 1, ["fp8"], seconds=60)
    assert row.cells["fp8"].verdict == cells.FAILED


@pytest.mark.parametrize("name", MEASURED)
def test_the_table_is_what_is_measured(name: str) -> None:
    found = conditioning.measured([operators()[name]], 60, lambda name, failed: None).table()
    table = json.loads(conditioning.TABLE.read_text(encoding="utf-8"))
    is_its_torch = importlib.metadata.version("torch") == table["torch"]
    checked = 0
    for aten, row in found.items():
        for role in {"operands", "result"} & row.keys():
            kept = table["operators"].get(aten, {}).get(role)
            if kept is not None and kept["by"].removesuffix(conditioning.OVER_ITS_DOMAIN) == name:
                checked += 1
                assert (measured.verdict(row[role]) is None) == (measured.verdict(kept) is None)
                if is_its_torch:
                    for fmt in conditioning.FORMATS:
                        assert row[role][fmt] == pytest.approx(kept[fmt], rel=0.1)
    assert checked


def test_the_autocast_bound_is_not_met_by_chance() -> None:
    """Autocast's error is that of 16 bits; what stands in for it where it raises is too."""
    model = next(exercise.samples_of(operators()["nn.functional.gelu"]))
    reference = op_db.Reference.of(model)
    assert reference is not None
    assert 1e-4 < reference.autocast.gradients < 0.05
    with op_db._rounded(torch.bfloat16):
        rounded = exercise.errors(exercise.step(model, model.rounded(torch.bfloat16)), reference.exact, model.values)
    assert 1e-4 < rounded[1] < 0.05
