"""A jump of the loss: which one is, and the first tensor that moved."""

import math
import warnings

import pytest
import torch
from torch import nn

import fxprec
from fxprec.errors import FxprecWarning, NonfiniteError
from fxprec.runtime.losses import LEAST, LossWatch

BAD = 25


def jumps(losses) -> list[tuple[int, str]]:
    watch, found = LossWatch(), []
    for step, loss in enumerate([*losses, 0.0], start=1):
        watch.note(step, loss)
        found += [(jump.step, str(jump)) for jump in watch.jumps(before=step)]
    return found


def falling(count: int) -> list[float]:
    noise = torch.Generator().manual_seed(0)
    return [2 / (1 + step / 20) * (1 + 0.1 * float(torch.randn((), generator=noise))) for step in range(count)]


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        (falling(300), []),
        ([*falling(40), 9.0, 9.5, 1.0, 1.0], [(41, "the loss rose to 9 from about 1.0")]),
        ([*falling(40), math.nan, math.nan], [(41, "the loss became nan from about 1.0")]),
        ([1.0] * 40 + [1.4, 1.6], [(42, "the loss rose to 1.6 from about 1 at step 42")]),
        ([1.0] * (LEAST - 1) + [1e3], []),
        ([*[1.0] * 30, 5.0, 1.0, 5.0], [(31, "the loss rose to 5"), (33, "the loss rose to 5")]),
    ],
)
def test_a_jump_is_what_stands_out_of_the_losses_before(losses, told):
    found = jumps(losses)
    assert [step for step, _ in found] == [step for step, _ in told]
    assert all(text.startswith(wanted) for (_, text), (_, wanted) in zip(found, told, strict=True))


def test_losses_of_steps_that_were_given_up_are_forgotten():
    """A state of an earlier step is loaded: its losses had waited behind those of later steps."""
    watch = LossWatch()
    for step in range(LEAST):
        watch.note(step, 1.0)
    assert not list(watch.jumps(before=LEAST))
    for step, loss in ((LEAST, math.inf), (3, 1.0), (4, 100.0)):
        watch.note(step, loss)
    assert [jump.step for jump in watch.jumps(before=5)] == [4]


def trained(change, *, steps=BAD + 2, **options) -> fxprec.Backend:
    """Train, ``change(model, batch)`` before step 25; each loss is noted."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    config = fxprec.Config(**{"recipe": "fp8", "lowering": "eager", "promote_above": None, **options})
    call = torch.compile(model, backend=(backend := fxprec.Backend(config)))
    for step in range(1, steps + 1):
        torch.manual_seed(step)
        x = torch.randn(64, 8)
        if step == BAD:
            x = change(model, x)
        loss = call(x).square().mean()
        loss.backward()
        backend.note_loss(loss)
        model.zero_grad()
    return backend


def louder(model, x, by=10):
    with torch.no_grad():
        model[2].weight.mul_(by)
    return x


def test_the_first_tensor_that_moved_is_named_with_its_statistics():
    with pytest.warns(
        FxprecWarning, match=r"addmm_1 \(2.*\) grew by a factor of 8 or more at step 25, first in the order of"
    ):
        backend = trained(louder, on_nonfinite="report")
    (departure,) = backend.departures
    assert (departure.site.module, departure.step, departure.seen_at, departure.value) == ("2", BAD, BAD, "growth")
    assert len(departure.statistics) == BAD
    (event,) = [event for event in backend.events if event.kind == "loss-jump"]
    assert event.step == BAD
    assert "the loss rose to" in event.detail


def test_a_tensor_whose_copy_overflows_left_its_range():
    with pytest.warns(FxprecWarning, match=r"addmm_1 \(2.*\) left its range at step 25, first in the order of"):
        backend = trained(lambda model, x: louder(model, x, by=20), on_nonfinite="report")
    assert [departure.site.module for departure in backend.departures] == ["2"]


def test_raise_ends_the_run_and_none_is_an_event_alone():
    with pytest.raises(
        NonfiniteError, match=r"the loss rose to .*; check the batch, or set on_nonfinite='report' to go"
    ):
        trained(louder, on_nonfinite="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend = trained(louder)
        ignored = trained(louder, on_nonfinite="ignore")
    assert {event.kind for event in ignored.events} == {"scale"}
    assert [event.kind for event in backend.events if event.kind != "scale"] == ["loss-jump"]


def test_where_nothing_stored_moved_that_is_said():
    def same(model, x):
        with torch.no_grad():
            model[4].bias.add_(3.0)  # of the last layer, whose result nobody stores
        return x

    backend = trained(same)
    (event,) = (event for event in backend.events if event.kind != "scale")
    assert (event.kind, event.site) == ("loss-jump", "loss")
    assert event.detail.endswith("or watch more with on_nonfinite='report'")
    assert not backend.departures


def test_what_is_no_loss_is_told():
    backend = fxprec.Backend(fxprec.Config(recipe="fp8"))
    for loss, words in ((torch.ones(3), r"loss has shape \(3,\)"), ("low", "loss has str; give a tensor of one")):
        with pytest.raises(fxprec.ConfigError, match=words):
            backend.note_loss(loss)
