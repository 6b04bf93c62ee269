"""An inf or a NaN: the first tensor that left its range is named, in the order of execution; nobody waits for it."""

import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import fxprec
from fxprec import compat
from fxprec.config import Settings
from fxprec.passes.lowering.rows import rows_of
from fxprec.plan import Plan, Site
from fxprec.runtime.nonfinite import WINDOW, NonfiniteWatch
from fxprec.runtime.stats import SiteStats

SITES = {
    i: Site(
        id=i, tensor=f"t{i}", kind="output", module=f"m{i}", shape="4", group=0, format="e4m3fn", direction="forward"
    )
    for i in range(3)
} | {
    i: Site(
        id=i, tensor=f"t{i}", kind="grad_output", module="", shape="4", group=0, format="bf16", direction="backward"
    )
    for i in (3, 4)
}


def step(watch: NonfiniteWatch, number: int, *amax: float, overflow: float = 0.0):
    rows = [SiteStats(i, overflow if i == 0 else 0.0, 0.0, value) for i, value in enumerate(amax)]
    return watch.note(number, rows, SITES)


def test_the_first_that_runs_is_named_and_once():
    watch = NonfiniteWatch(gradients=True)
    assert step(watch, 1, 1.0, 2.0, 3.0) is None
    found = step(watch, 2, 1.0, math.inf, math.nan)
    assert (found.site.tensor, found.step, found.seen_at, found.value) == ("t1", 2, 2, "inf")
    assert found.statistics == ((1, 2.0, 0.0, 0.0), (2, math.inf, 0.0, 0.0))
    assert step(watch, 3, 1.0, math.inf, math.nan) is None
    assert step(watch, 4, 1.0, 1.0, 1.0) is None
    assert step(watch, 5, math.nan, 1.0, 1.0).site.tensor == "t0"


@pytest.mark.parametrize("wide", [{"overflow": 0.5}, {"amax": 5000.0}, {"amax": 448.0}])
def test_who_left_its_range_some_steps_before_comes_before_who_became_nan(wide):
    watch = NonfiniteWatch(gradients=True)
    for number in range(1, 7):
        assert step(watch, number, 1.0, 2.0, 3.0) is None
    for number in (7, 8):
        assert step(watch, number, wide.get("amax", 1.0), 2.0, 3.0, overflow=wide.get("overflow", 0.0)) is None
    found = step(watch, 9, wide.get("amax", 1.0), 2.0, math.nan, overflow=wide.get("overflow", 0.0))
    assert (found.site.tensor, found.step, found.seen_at, found.value) == ("t0", 7, 9, "overflow")
    assert found.detail.startswith("left its range from step 7 on, first in the order of execution; an inf or NaN was")


def test_what_always_overflowed_is_no_cause():
    watch = NonfiniteWatch(gradients=True)
    for number in range(1, WINDOW + 20):
        step(watch, number, 500.0, 2.0, 3.0, overflow=0.5)
    found = step(watch, 300, 500.0, 2.0, math.inf, overflow=0.5)
    assert (found.site.tensor, found.step, len(found.statistics)) == ("t2", 300, WINDOW)


def test_backward_runs_from_the_end_and_a_dynamic_loss_scale_overflows_on_purpose():
    bad = (1.0, 1.0, 1.0, math.inf, math.inf)
    assert step(NonfiniteWatch(gradients=True), 1, *bad).site.tensor == "t4"
    assert step(NonfiniteWatch(gradients=False), 1, *bad) is None


def test_a_tensor_that_arrives_twice_in_a_step_is_out_of_range_if_it_was_so_once():
    """Gradients of two forward passes before a backward, as of a siamese network: either may have been the bad one."""
    for last in ((math.inf, 1.0), (1.0, math.inf)):
        watch = NonfiniteWatch(gradients=True)
        for number, pair in enumerate(((1.0, 2.0), (2.0, 1.0), last)):
            found = watch.note(number, [SiteStats(0, 0.0, 0.0, amax) for amax in pair], SITES)
        assert (found.site.tensor, found.step, found.seen_at, found.value) == ("t0", 2, 2, "inf")
        assert found.statistics == ((0, 2.0, 0.0, 0.0), (1, 2.0, 0.0, 0.0), (2, math.inf, 0.0, 0.0))


def trained(bad: float | None, **options) -> fxprec.Backend:
    """Train for some steps, the third on a batch with a bad number in it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    backend = fxprec.Backend(fxprec.Config(**{"recipe": "bf16", **options}, lowering="eager"))
    call = torch.compile(model, backend=backend)
    for number in range(5):
        x = torch.randn(32, 8)
        if number == 2 and bad is not None:
            x[3, 2] = bad
        call(x).square().mean().backward()
    return backend


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8"])
def test_an_inf_in_a_batch_is_reported_with_its_tensor_and_step(recipe):
    with pytest.warns(fxprec.FxprecWarning) as caught:
        backend = trained(math.inf, recipe=recipe, on_nonfinite="report")
    assert any("holds inf at step 3, first in the order of execution" in str(w.message) for w in caught)
    (found,) = backend.departures
    assert (found.site.id, found.site.tensor, found.step, found.value) == (0, "args.0", 3, "inf")
    assert [e.step for e in backend.events if e.kind == "left-range"] == [3]


def test_raise_ends_the_run_before_the_next_step_with_the_way_out():
    words = r"args\.0 holds NaN at step 3, .*; check the batch, or set on_nonfinite='report' to go on"
    with pytest.raises(fxprec.NonfiniteError, match=words):
        trained(math.nan, on_nonfinite="raise")


@pytest.mark.parametrize("goes_back", [False, True])
def test_whoever_looks_first_the_next_step_raises_unless_it_goes_back(goes_back: bool):
    """A logger that asks for statistics in a try block had taken the error, and training had gone on."""
    backend = fxprec.Backend(fxprec.Config(recipe="fp8", lowering="eager", on_nonfinite="raise"))
    compiled, x = torch.compile(nn.Linear(16, 8), backend=backend), torch.ones(4, 16)
    for _ in range(2):
        compiled(x).sum().backward()
    before = backend.state_dict()
    compiled(x * math.inf).sum().backward()
    with pytest.warns(fxprec.FxprecWarning, match="inf stored as 448"):
        backend.stats()
    backend.state_dict()
    if goes_back:
        backend.load_state_dict(before)
    error = pytest.raises(fxprec.NonfiniteError, match="holds inf at step 3, first in the order of execution")
    with nullcontext() if goes_back else error:
        compiled(x)


def test_ignored_or_with_nothing_to_tell_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxprec.FxprecWarning)
        assert trained(math.inf, on_nonfinite="ignore").departures == ()
        assert trained(None, on_nonfinite="report").departures == ()
    with pytest.raises(
        fxprec.ConfigError, match=r"'rais'; did you mean 'raise'\?; allowed: 'report', 'raise', 'ignore', or None$"
    ):
        fxprec.Config(on_nonfinite="rais")


def test_where_every_inf_is_wanted_no_cast_is_counted_from_its_codes():
    plan = Plan(sites=(SITES[0],))
    rows = {
        wanted: rows_of(plan, None, Settings.of(fxprec.Config(recipe="fp8", on_nonfinite=wanted)))
        for wanted in (None, "report")
    }
    assert (rows[None].inlines, rows["report"].inlines) == (True, False)


@pytest.mark.parametrize(("zero", "is_kept"), [(0, compat.torch_version() >= (2, 14)), (0.0, True)])
def test_a_nan_times_an_integer_0_is_0_as_docs_limits_md_says(zero: float, is_kept: bool):
    """Inductor's passes fold it, which run here too: ``softshrink`` of a NaN is 0."""
    compiled = torch.compile(lambda x: x * zero, backend="fxprec", options={"recipe": "fp32", "lowering": "eager"})
    assert bool(compiled(torch.tensor([math.nan], requires_grad=True)).isnan()) == is_kept
