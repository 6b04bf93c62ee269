"""The kit without pytest: rules, training bands, bitwise comparison, the report page."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxprec import Config, ConfigError, GoldenError, NumericsError, Plan
from fxprec.plan import Group, KindCounts, Site
from fxprec.testing import Thresholds, assert_identical, golden, verify, verify_training
from fxprec.testing.measure import measure
from fxprec.testing.page import page

OPTIONS = {"recipe": "fp8", "low_ratio": 0.4}


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 16, generator=generator)
    return x, x[:, :4].argmax(1)


def test_measured_errors_are_those_of_numpy():
    exact = torch.randn(40, dtype=torch.float64)
    (m,) = measure({"x": exact * 1.01}, {"x": exact}, {"x": exact + 0.25})
    assert m.error == pytest.approx(0.01)
    assert m.sqnr == pytest.approx(40)
    assert m.gain == pytest.approx(1.01)
    assert m.reference_error == pytest.approx(float(0.25 * math.sqrt(40) / exact.norm()))
    (same,) = measure({"x": exact}, {"x": exact}, {"x": exact})
    assert same.error == 0
    assert [a / b for a, b in zip(m.sketch, same.sketch, strict=True)] == pytest.approx([1.01] * 4)
    (lost,) = measure({}, {"x": exact}, {"x": exact})
    assert lost.error == math.inf


# Of bf16's mantissa bits e4m3 lacks 4; a simulation rounds gradients too, to e5m2, which lacks 5.
@pytest.mark.parametrize(("storage", "k"), [("native", 48.0), ("simulate", 96.0)])
def test_rules_hold_tensor_by_tensor_and_k_follows_the_coarsest_format(storage, k):
    x, options = torch.randn(64, 16), {**OPTIONS, "storage": storage}
    assert not verify(mlp, x, options=options).findings
    strict = verify(mlp, x, options=options, thresholds=Thresholds(k=1.0, floor=0.0, sqnr=40.0))
    said = {f.tensor: f.text for f in strict.findings}
    assert "2.weight.grad" in said
    assert ({"output", "loss"} <= said.keys()) is (storage == "simulate"), "native: forward is bf16's"
    assert any(f.text.startswith("error is ") and f.text.endswith(" times bf16's; at most 1") for f in strict.findings)
    assert any(f.text.endswith("at least 40") for f in strict.findings)
    with pytest.raises(NumericsError, match=r"^numerics differ: \d+ findings, the worst "):
        strict.raise_if_wrong()
    plans = [p.golden.plans for p in (verify(mlp, x, options={"recipe": "bf16"}), verify(mlp, x, options=options))]
    assert [Thresholds().k_for(p) for p in plans] == [3.0, k]


def test_a_ratio_that_is_not_counted_is_no_difference(tmp_path):
    """Where codes are counted the underflow ratio is unknown."""
    site = Site(id=0, tensor="x", kind="output", module="", shape="4", group=0, format="bf16", direction="forward")
    plan = Plan(sites=(site,), groups=(Group(id=0, elements=0, elements_by_kind=KindCounts(), low=True, order=0),))
    numbers = {"amax": 1.0, "overflow_ratio": 0.0, "underflow_ratio": None, "scale_exponent": 0}
    backend = SimpleNamespace(
        plans=(plan,),
        all_plans=[plan],
        stats=lambda: [{"graph": 0, "site": 0, **numbers}],
        stop_promoting=lambda: None,
    )
    now = golden.take(Config(), backend, [], inputs="")
    again = golden.with_tolerances(
        now, SimpleNamespace(backend=backend, jittered=lambda *_: nullcontext()), lambda _: []
    )
    golden.save(again, tmp_path / "golden.json")
    assert golden.differences(golden.load(tmp_path / "golden.json"), now, {}) == []


def test_other_inputs_are_told_from_other_numbers(tmp_path):
    golden, x, other = tmp_path / "mlp.json", torch.randn(64, 16), torch.randn(64, 16)
    assert verify(mlp, x, golden=golden).wrote == golden
    assert verify(mlp, x * (1 + 2**-23), golden=golden).findings == [], "numbers within their tolerance need no reason"
    (found,) = verify(mlp, other, golden=golden).findings
    assert found.tensor == "(inputs)"
    assert found.text.startswith("the inputs changed since the golden file was written, so its numbers do not tell")
    assert "(inputs)" not in {f.tensor for f in verify(mlp, x, golden=golden, seed=1).findings}, "weights changed alone"
    data = json.loads(golden.read_text())
    assert len(data.pop("inputs")) == 32
    golden.write_text(json.dumps(data))
    findings = verify(mlp, other, golden=golden).findings
    assert {f.tensor for f in findings} >= {"output", "0.weight.grad"}, "an older file has no hash"
    golden.write_text(json.dumps({**data, "inputs": 3}))
    with pytest.raises(GoldenError, match="inputs is missing or not a str"):
        verify(mlp, x, golden=golden)


def test_no_warning_on_a_processor_without_16_bit_products():
    """Golden files are for every processor, so products are float32 on each."""
    verify(mlp, torch.randn(8, 16), options={"recipe": "bf16"})


def test_training_stays_in_the_band_of_its_seeds_and_leaves_it_when_it_learns_less(tmp_path):
    golden = tmp_path / "curve.json"
    common = {"options": OPTIONS, "loss": F.cross_entropy, "golden": golden, "steps": 12, "seeds": 3}
    assert verify_training(mlp, batch, **common).wrote == golden
    again = verify_training(mlp, batch, **common)
    assert (again.wrote, again.outside) == (None, [])
    assert again.losses[-1] < again.losses[0]

    def lazy(parameters):
        return torch.optim.SGD(parameters, lr=1e-4)

    stuck = verify_training(mlp, batch, **common, optimizer=lazy)
    assert stuck.outside[-1] == 11
    with pytest.raises(NumericsError, match=r"loss outside the band at \d+ of 12 steps"):
        stuck.raise_if_wrong()
    with pytest.raises(GoldenError, match="low has 12 steps, and the test trains 5"):
        verify_training(mlp, batch, **{**common, "steps": 5})
    golden.write_text(json.dumps({"schema": 1, "low": [0, "x"], "high": []}))
    with pytest.raises(GoldenError, match=r"curve\.json: low is not a list of numbers; rewrite it"):
        verify_training(mlp, batch, **common)
    with pytest.raises(ConfigError, match="at least 1 step and 2 seeds"):
        verify_training(mlp, batch, **{**common, "seeds": 1})


def test_identical_is_bit_for_bit():
    x = torch.tensor([0.0, 1.0, math.nan])
    model = mlp()
    assert_identical((x, {"a": [model]}), (x.clone(), {"a": [model]}))
    assert_identical(Plan(), lambda: Plan())
    for before, after, words in (
        (x, torch.tensor([-0.0, 1.0, math.nan]), r"1 of 3 elements differ; the first, number 0, is 0\.0 and not -0\.0"),
        (x, x.double(), r"torch\.float32 \(3,\) is not torch\.float64 \(3,\)"),
        ({"w": x}, {}, r"\['w'\] +only in the first"),
        (torch.tensor(1 + 2j), torch.tensor(1 + 3j), "1 of 1 elements differ"),
        (3, 3.0, "3 is not 3.0"),
    ):
        with pytest.raises(NumericsError, match=words):
            assert_identical(before, after)
    other = mlp()
    with pytest.raises(NumericsError, match=r"\['0\.weight'\] +\d+ of 512 elements differ"):
        assert_identical(model, other)


def test_page_escapes_names_and_draws_curves():
    curve = {"kind": "training", "name": "c", "losses": [3.0, "nan"], "low": [1.0, 0.5], "high": [4.0, 2.0]}
    text = page([{"test": "t.py::<script>alert(1)</script>", "outcome": "failed", "checks": [curve]}])
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert text.count("<polyline") == text.count("<polygon") == 1
    assert "src=" not in text
    assert "http" not in text
    skipped = page([{"test": "t.py::skipped", "outcome": "skipped", "checks": []}])
    assert ('class="good"' in skipped, "--numerics-update" in skipped) == (True, False), "an expected failure, too"
