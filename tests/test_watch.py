"""``watch_every``: a biased rounding is named, and attention's growing logits are told before a NaN."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprec
from fxprec.driver import half_compilation
from fxprec.errors import ConfigError, FxprecWarning
from fxprec.ir.symbolic import Quantize
from fxprec.numerics import block_codec, directed
from fxprec.numerics.bias import bias, block_bias
from fxprec.numerics.blocks import find
from fxprec.numerics.rounding import quantize
from fxprec.numerics.rows import format_row
from fxprec.runtime import reference_ops
from fxprec.runtime.growth import Growth

NORMAL = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
VALUES = {"normal": NORMAL, "after ReLU": NORMAL.relu(), "shares": NORMAL.view(128, 128).mul(3).softmax(-1).flatten()}


def random_bits(x):
    return torch.randint(2**31 - 1, x.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", ["bf16", "e4m3fn", "e5m2", "1-2-1", "1-3-0"])
def test_rounding_toward_zero_is_biased_and_to_nearest_or_at_random_is_not(name, values):
    fmt, x = find(name), VALUES[values]
    row = format_row(fmt)
    assert not bias(x, quantize(x, fmt), fmt).is_biased
    assert not bias(x, directed.dithered(x, random_bits(x), row), fmt).is_biased
    cut = bias(x, directed.truncated(x, row), fmt)
    assert cut.is_biased
    assert "toward zero on average" in str(cut)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "mxfp4", "int8", "int4/64:bf16"])
def test_blocks_are_measured_by_their_own_scales(name):
    fmt, x = find(name), NORMAL * torch.logspace(-6, 6, NORMAL.numel())
    whole = block_codec.tensor_scale(x, fmt) if fmt.tensor_scale else None
    seed = torch.tensor([5], dtype=torch.int32)
    for records in (block_codec.stored(x, None, whole, 0, name), block_codec.stored(x, seed, whole, 0, name)):
        found = block_bias(x, records, fmt, whole)
        assert not found.is_biased
        assert found.elements > 1000


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "int8"])
def test_blocks_of_smaller_numbers_are_biased(name):
    fmt = find(name)
    whole = block_codec.tensor_scale(NORMAL, fmt) if fmt.tensor_scale else None
    records = block_codec.stored(NORMAL if name == "int8" else NORMAL * 0.8, None, whole, 0, name)
    if name == "int8":
        codes = records[:, fmt.head_bytes :]
        codes.copy_(codes.clamp_min(1) - 1)
    found = block_bias(NORMAL, records, fmt, whole)
    assert found.is_biased
    assert ("a last place down on" if name == "int8" else "toward zero") in str(found)


def test_a_rounding_up_is_seen_where_signs_cancel_it_toward_zero():
    fmt = find("e4m3fn")
    up = torch.where(
        NORMAL > 0, directed.raised(NORMAL.abs(), format_row(fmt)), directed.truncated(NORMAL, format_row(fmt))
    )
    found = bias(NORMAL, up, fmt)
    assert abs(found.outward) < 0.1
    assert 0.4 < found.upward == found.worst
    assert "of a last place up on average" in str(found)


def test_what_a_format_holds_exactly_or_not_at_all_is_no_bias():
    fmt = find("e4m3fn")
    for x in (torch.ones(1000), torch.full((1000,), 1e-6), torch.full((1000,), 1e6), torch.zeros(0)):
        assert bias(x, quantize(x, fmt), fmt).elements == 0


class Attends(nn.Module):
    """One attention, by torch's function or by hand."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.by_hand = by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (layer(x).view(batch, length, 4, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.by_hand:
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            y = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(later, -math.inf).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(batch, length, width)


def network(by_hand=False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), Attends(by_hand), nn.GELU(), nn.Linear(32, 32))


def train(model, *, steps=6, change=lambda model: None, **options):
    """Train; return the losses and the backend."""
    torch.compiler.reset()
    config = fxprec.Config(**{"lowering": "eager", "promote_above": None, "watch_every": 1, **options})
    call = torch.compile(model, backend=(backend := fxprec.Backend(config)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = call(torch.randn(16, 16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            change(model)
    return losses, backend


def told(backend, *kinds):
    return [event for event in backend.events if event.kind in (kinds or ("biased", "logit-growth"))]


RECIPES = ({"recipe": "fp8"}, {"recipe": "bf16"}, {"recipe": "fp8+int8"}, {"recipe": "mxfp8"}, {"recipe": "nvfp4"})
STORAGES = ({"recipe": "hfp8", "storage": "packed"}, {"recipe": "hfp8", "storage": "simulate"})


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("options", [*RECIPES, *STORAGES], ids=str)
def test_a_clean_run_is_told_nothing_of(options, by_hand):
    losses, backend = train(network(by_hand), **options)
    assert told(backend) == []
    ((name, looks),) = backend.attention_logits.items()
    assert name.startswith("1, test_watch.py:")
    assert [step for step, _ in looks] == [1, 2, 3, 4, 5, 6]
    assert all(0.1 < largest < 10 for _, largest in looks)
    assert losses == train(network(by_hand), **options, watch_every=None)[0]


def test_compiled_code_that_draws_other_masks_is_told_nothing_of():
    model = nn.Sequential(nn.Dropout(0.25), *network(), nn.Dropout(0.25), nn.Linear(32, 32))
    _, backend = train(model, recipe="fp8", lowering="auto")
    assert told(backend) == []


def test_the_logits_are_those_of_the_queries_and_keys():
    model = network()
    x = torch.randn(16, 16, 32)
    torch.compiler.reset()
    backend = fxprec.Backend(fxprec.Config(recipe="fp8", lowering="eager", watch_every=1))
    torch.compile(model, backend=backend)(x).sum().backward()
    hidden = model[0](x)
    q, k = (layer(hidden).view(16, 16, 4, 8).transpose(1, 2) for layer in (model[1].q, model[1].k))
    wanted = (q @ k.transpose(-1, -2) / 8**0.5).tril().abs().max().detach()
    ((_, looks),) = backend.attention_logits.items()
    assert looks[0][1] == pytest.approx(wanted.item(), rel=0.02)


def plant(monkeypatch, chosen):
    """Let the code of the forward half round toward zero where it stores one tensor; what watches it is not changed."""
    lower = half_compilation.lower
    aten = torch.ops.aten

    def faulty(gm, *args, **options):
        for q, call in Quantize.among(Quantize.nodes(gm.graph)):
            if call.row == chosen:
                with gm.graph.inserting_before(q):
                    bits = gm.graph.call_function(aten.view.dtype, (call.x, torch.int32))
                    cut = gm.graph.call_function(aten.bitwise_and.Scalar, (bits, -1 << 20))  # 3 mantissa bits stay
                    x = gm.graph.call_function(aten.view.dtype, (cut, torch.float32))
                val = call.x.meta["val"]
                for node, dtype in ((bits, torch.int32), (cut, torch.int32), (x, torch.float32)):
                    node.meta["val"] = val.to(dtype)
                q.replace_input_with(call.x, x)
        return lower(gm, *args, **options)

    monkeypatch.setattr(half_compilation, "lower", faulty)


@pytest.mark.parametrize("lowering", ["eager", "auto"])
def test_the_site_that_compiled_code_rounds_toward_zero_is_named_and_no_other(monkeypatch, lowering):
    _, backend = train(network(), steps=1, recipe="fp8", lowering=lowering)
    sites = [s for s in backend.plans[0].sites if s.format == "e4m3fn" and s.direction == "forward"]
    chosen = sites[len(sites) // 2]
    plant(monkeypatch, chosen.id)
    with pytest.warns(FxprecWarning, match=f"{chosen.tensor} .*of a last place toward zero on average"):
        _, backend = train(network(), steps=4, recipe="fp8", lowering=lowering)
    (event,) = told(backend)
    assert (event.step, event.kind) == (1, "biased")
    assert event.site.startswith(f"{chosen.tensor} (")
    assert chosen.source in event.site


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_the_operand_of_a_gemm_that_is_rounded_toward_zero_is_named(monkeypatch, recipe):
    chosen = -4
    whole = block_codec.stored

    def faulty(x, seed, scale, row, format):
        return whole(x * 0.8 if row == chosen else x, seed, scale, row, format)

    monkeypatch.setattr(block_codec, "stored", faulty)
    with pytest.warns(FxprecWarning, match="toward zero"):
        _, backend = train(network(), steps=2, recipe=recipe)
    (event,) = told(backend)
    assert event.kind == "biased"
    assert event.site.startswith("operand ")
    assert "test_watch.py:" in event.site or "linear.py:" in event.site


@pytest.mark.parametrize(("by_hand", "factor"), [(False, 1.5), (True, 4)])
def test_growing_logits_are_told_before_the_loss_is_nan(by_hand, factor):
    def grow(model):
        model[1].q.weight.mul_(factor)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, backend = train(network(by_hand), steps=80, recipe="fp8", watch_every=2, change=grow)
    assert any("the largest logit is" in str(warning.message) for warning in caught)
    first_nan = next(step for step, loss in enumerate(losses, start=1) if not math.isfinite(loss))
    first = told(backend, "logit-growth")[0]
    assert first.step + 5 <= first_nan
    assert first.site.startswith("1, test_watch.py:")
    assert "at first; it doubled in 2 steps" in first.detail
    assert told(backend, "biased") == []


def grown(*values) -> list[int]:
    growth = Growth()
    return [i for i, value in enumerate(values) if growth.note(i, value) is not None]


def test_growth_is_told_above_a_limit_and_then_at_each_doubling():
    assert grown(1, 2, 4, 8, 30, 60, 99, 101, 150, 202, 250, 500) == [7, 9, 11]
    assert grown(150, 150, 160, 150, 150, 170, 299, 301) == [7]  # large all along
    assert grown(1, 2, math.nan, math.inf, 120) == [4]


def test_steps_between_looks_are_not_looked_at():
    _, backend = train(network(), steps=7, recipe="fp8", watch_every=3)
    ((_, looks),) = backend.attention_logits.items()
    assert [step for step, _ in looks] == [1, 4, 7]


def test_an_option_that_does_nothing_says_so():
    with pytest.raises(ConfigError, match="watch_every is 0; give it an int of at least 1"):
        fxprec.Config(watch_every=0)
    with pytest.raises(fxprec.FxprecError, match="watch_every=5 has no effect"):
        train(network(), steps=1, recipe="fp32", watch_every=5, lowering="auto", strict=True)


def test_a_watched_step_moves_parameters_once_where_backward_steps_them():
    """Watching runs backward a second time, and stepped the parameters outside of it: an IndexError."""
    weights = []
    for watch_every in (None, 1):
        model = network()
        optimizer = fxprec.optim.SGD(model.parameters(), lr=0.1)
        config = fxprec.Config(recipe="hfp8", lowering="eager", watch_every=watch_every)
        compiled = torch.compile(model, backend=fxprec.Backend(config, optimizer=optimizer))
        for step in range(2):
            compiled(torch.randn(16, 16, 32, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


class Shifts(nn.Module):
    """Stores nothing for backward, and multiplies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def test_a_step_that_has_nothing_to_look_at_says_so():
    backend = fxprec.Backend(fxprec.Config(recipe="fp8", watch_every=1, lowering="eager"))
    torch.compiler.reset()
    with pytest.warns(FxprecWarning, match="watch_every: nothing in the step is rounded by a cast"):
        torch.compile(Shifts(), backend=backend)(torch.randn(4, 32)).sum().backward()


def test_the_doctor_names_biased_casts_and_no_other(monkeypatch):
    def ranking():
        return fxprec.doctor(network(), torch.randn(16, 16, 32), options={"reruns": 0}).ranking

    assert not any(row.reason.startswith("biased") or abs(row.bias) > 0.1 for row in ranking())
    encode, chosen = reference_ops.reference_encode, find("e4m3fn")

    def faulty(x, fmt):
        is_chosen = (x.shape, fmt) == (torch.Size([256, 32]), chosen)
        return encode(directed.truncated(x, format_row(fmt)) if is_chosen else x, fmt)

    monkeypatch.setattr(reference_ops, "reference_encode", faulty)
    rows = ranking()
    named = {row.tensor for row in rows if row.reason.startswith("biased: it is rounded 0.")}
    assert named == {"addmm", "addmm_3"}
    assert {row.tensor for row in rows if row.bias < -0.4} == named
