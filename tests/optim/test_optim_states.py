"""Option ``states``: averages in 8 bits or bfloat16, how exact they are, and what is saved of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim.weights import same, through_file, values, weights
from torch import Tensor, nn

import fxprec
from fxprec.errors import ConfigError
from fxprec.runtime.optim import states
from fxprec.runtime.optim.rounding import dither_bits

MEAN, SQUARE = "exp_avg", "exp_avg_sq"
FORMS = ("8bit", "4bit")
ANY_FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**120), max_value=2.0**120)


def bits_at(step: int, n: int) -> Tensor:
    numbers = (torch.tensor(x, dtype=torch.int32) for x in (7, 11, step))
    return dither_bits(torch.arange(n, dtype=torch.int32), *numbers, 1)


def reread(name: str, x: Tensor, random: Tensor | None = None, form: str = "8bit") -> Tensor:
    codes = states.codes_of(form, name)
    return states.decode(codes, *states.encode(codes, x, random), len(x))


def blocks(x: Tensor) -> Tensor:
    missing = -len(x) % states.BLOCK
    return torch.cat([x, x.new_zeros(missing)]).view(-1, states.BLOCK)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [MEAN, SQUARE])
@settings(max_examples=150, deadline=None)
@given(values=st.lists(ANY_FLOAT, max_size=150), step=st.integers(1, 100), random=st.booleans())
def test_an_error_is_a_unit_of_its_binade_or_of_the_blocks_smallest(
    form: str, name: str, values: list[float], step: int, random: bool
) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    x = x.abs() if name == SQUARE else x
    found = reread(name, x, bits_at(step, len(x)) if random else None, form)
    largest = blocks(x.abs()).amax(1).repeat_interleave(states.BLOCK)[: len(x)] if len(x) else x
    # The smallest step is a unit in the lowest of 3 binades (mean) or 7 (square) below a carry.
    bits = 5 if form == "8bit" else 1
    smallest = largest * 2.0 ** ((-1 if name == MEAN else -5) - bits) + 2.0 ** -(127 + bits)  # under the least scale
    error, unit = (found - x).abs(), torch.maximum(x.abs() * 2.0**-bits, smallest)
    assert bool((error <= unit).all())
    assert bool((found * x >= 0).all())
    if name == SQUARE:
        assert bool(((found > 0) == (x > 0)).all()), "an average of squares never becomes zero"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [MEAN, SQUARE])
@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(ANY_FLOAT | st.floats(min_value=0, max_value=2.0**-126, width=32), min_size=1, max_size=150),
    step=st.integers(1, 100),
)
def test_encoding_again_changes_nothing_and_bfloat16_holds_all(
    form: str, name: str, values: list[float], step: int
) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    once = reread(name, x.abs() if name == SQUARE else x, bits_at(step, len(x)), form)
    assert torch.equal(once.bfloat16().float(), once)
    assert torch.equal(reread(name, once, None, form), once)
    assert torch.equal(reread(name, once, bits_at(step + 1, len(x)), form), once)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [MEAN, SQUARE])
def test_every_code_is_a_number_of_its_own(name: str, form: str) -> None:
    kind, count = states.codes_of(form, name), 256 if form == "8bit" else 16
    codes = torch.arange(256, dtype=torch.uint8)
    if form == "4bit":  # each pair of codes
        codes = codes.view(-1, 32)
    for scale in (0, 1, 127, 200, 246):
        elements = codes.numel() * 256 // count // (8 if form == "4bit" else 1)
        scales = torch.full((states.num_blocks(elements),), scale, dtype=torch.uint8)
        found = states.decode(kind, codes.reshape(-1), scales, elements)
        assert bool(torch.isfinite(found).all())
        assert len(found.unique()) == (count if name == SQUARE else count - 1)  # two zeros
        assert torch.equal(found.bfloat16().float(), found)
        for random in (0, 0x7FFFFFFF):
            assert torch.equal(reread(name, found, torch.full((elements,), random, dtype=torch.int32), form), found)


@pytest.mark.parametrize(("form", "off"), [("8bit", 2e-3), ("4bit", 2e-2)])
@pytest.mark.parametrize("name", [MEAN, SQUARE])
def test_what_is_rounded_has_the_numbers_mean(name: str, form: str, off: float) -> None:
    """The largest of a block too, which needs room above it."""
    x = torch.linspace(0.06, 1.99, states.BLOCK)
    mean = torch.stack([reread(name, x, bits_at(step, len(x)), form) for step in range(512)]).mean(0)
    assert float(((mean - x).abs() / x).max()) < off


def test_a_mean_below_half_of_the_smallest_number_is_zero_whatever_the_bits() -> None:
    x = torch.ones(states.BLOCK)
    x[1:] = 0.49 * 2.0**-7
    for step in range(20):
        assert not reread(MEAN, x, bits_at(step, len(x)))[1:].any()
    assert reread(MEAN, x * 1.1, bits_at(1, len(x)))[1:].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_block_with_inf_or_nan_reads_as_nan_and_no_other(bad: float, form: str) -> None:
    x = torch.ones(3 * states.BLOCK)
    x[states.BLOCK + 5] = bad
    found = blocks(reread(MEAN, x, None, form)).isnan()
    assert found.all(1).tolist() == [False, True, False]
    assert found.any(1).tolist() == [False, True, False]


def test_an_average_that_moves_by_a_part_of_a_unit_arrives() -> None:
    """Rounding to nearest loses every step of 0.999; codes that are dithered follow within a unit."""
    decay, n = 0.999, 4 * states.BLOCK
    start, target = torch.full((n,), 1.0), torch.full((n,), 0.55)
    start[:: states.BLOCK] = target[:: states.BLOCK] = 1.9  # what the block's scale follows
    exact, nearest, dithered = start.clone(), start.clone(), start.clone()
    for step in range(3000):
        exact = exact * decay + target * (1 - decay)
        nearest = reread(SQUARE, nearest * decay + target * (1 - decay))
        dithered = reread(SQUARE, dithered * decay + target * (1 - decay), bits_at(step, n))
    assert float((nearest - exact).abs().max()) > 0.4
    assert float((dithered - exact).abs().max()) < 2 * 2.0**-5
    assert abs(float((dithered - exact).mean())) < 0.004


# Whole optimizers.


SHAPES = ((33, 64), (7,), (0,), (), (3, 5, 2), (70,))


def train(opt: Any, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        g = torch.Generator().manual_seed(step)
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = (torch.randn(p.shape, generator=g) * torch.rand(p.shape, generator=g)).to(p.dtype)
        opt.step()


SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"lr": 0.01, "amsgrad": True}


@pytest.mark.parametrize("held", ["float32", "bf16", "8bit", "4bit"])
@pytest.mark.parametrize(("name", "options"), [("SGD", SGD), ("AdamW", ADAMW)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_and_the_reference_train_alike(name: str, options: dict[str, Any], held: Any, dtype: Any) -> None:
    make = getattr(fxprec.optim, name)
    fast = make(weights(dtype, SHAPES), states=held, **options)
    slow = make(weights(dtype, SHAPES), states=held, foreach=False, **options)
    for opt in (fast, slow):
        train(opt, 0, 12)
    assert same(values(fast), values(slow))
    for a, b in zip(fast.state.values(), slow.state.values(), strict=True):
        assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)


@pytest.mark.parametrize(("name", "averages"), [("AdamW", [MEAN, SQUARE]), ("Lion", [MEAN])])
def test_bytes_of_each_form(name: str, averages: list[str]) -> None:
    def held(states: Any) -> float:
        p = nn.Parameter(torch.zeros(64, 1000))
        opt = getattr(fxprec.optim, name)([p], states=states)
        p.grad = torch.ones_like(p)
        opt.step()
        assert sorted(opt.state_dict()["state"][0]) == [*averages, "step"]
        found = sum(t.nbytes for t in opt.state[p].values() if isinstance(t, Tensor) and t.dim())
        assert found == opt.state_bytes()
        return found / p.numel() / len(averages)

    shared = 1 / states.BLOCK
    assert [held(form) for form in (None, "float32", "bf16", "8bit", "4bit")] == [4, 4, 2, 1 + shared, 0.5 + shared]


@pytest.mark.parametrize("held", ["float32", "bf16", "8bit", "4bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), [("SGD", SGD), ("AdamW", ADAMW)])
def test_training_resumes_bit_for_bit_from_a_file(name: str, options: dict[str, Any], held: Any, dtype: Any) -> None:
    make = getattr(fxprec.optim, name)
    whole = make(weights(dtype, SHAPES), states=held, **options)
    train(whole, 0, 4)
    state = through_file(whole.state_dict())
    copies = [nn.Parameter(p.clone()) for p in values(whole)]
    train(whole, 4, 4)
    resumed = make(copies, **{**options, "betas": (0.9, 0.99)} if name == "AdamW" else options)
    resumed.load_state_dict(state)
    assert resumed.param_groups[0]["states"] == held
    train(resumed, 4, 4)
    assert same(values(whole), values(resumed))


@pytest.mark.parametrize("form", FORMS)
def test_torch_optim_takes_the_state_and_gives_it_back(form: Any) -> None:
    ours = fxprec.optim.AdamW(weights(shapes=SHAPES), lr=0.01, states=form, update="nearest")
    train(ours, 0, 5)
    saved = ours.state_dict()
    theirs = torch.optim.AdamW([nn.Parameter(p.clone()) for p in values(ours)], lr=0.01)
    theirs.load_state_dict(copy.deepcopy(saved))
    for number, state in saved["state"].items():
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
        for key, value in state.items():
            assert torch.equal(theirs.state_dict()["state"][number][key], value.float())
            assert key == "step" or theirs.state_dict()["state"][number][key].dtype == torch.float32
    back = fxprec.optim.AdamW([nn.Parameter(p.clone()) for p in values(ours)], lr=0.01, states=form, update="nearest")
    back.load_state_dict(theirs.state_dict())
    for opt in (ours, back):
        train(opt, 5, 3)
    assert same(values(ours), values(back))


@pytest.mark.parametrize("form", FORMS)
def test_torch_optims_float32_state_is_rounded_to_nearest(form: Any) -> None:
    theirs = torch.optim.AdamW(weights(shapes=SHAPES), lr=0.01)
    train(theirs, 0, 3)
    ours = fxprec.optim.AdamW([nn.Parameter(p.clone()) for p in values(theirs)], states=form)
    ours.load_state_dict(theirs.state_dict())
    for state, saved in zip(ours.state_dict()["state"].values(), theirs.state.values(), strict=True):
        for key in (MEAN, SQUARE):
            assert torch.equal(state[key].float().flatten(), reread(key, saved[key].flatten(), None, form))


@pytest.mark.parametrize("form", FORMS)
def test_another_form_is_taken_up_at_the_next_step(form: Any) -> None:
    opt = fxprec.optim.AdamW(weights(shapes=SHAPES), lr=0.01, states=form)
    train(opt, 0, 3)
    before = opt.state_dict()["state"][0][MEAN].float()
    opt.param_groups[0]["states"] = "float32"
    opt.param_groups[0]["lr"] = 0.0
    opt.param_groups[0]["betas"] = (1 - 2.0**-20, 0.999)
    train(opt, 3, 1)
    state = opt.state[opt.param_groups[0]["params"][0]]
    assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
    assert state[MEAN].dtype == torch.float32
    assert float((state[MEAN] - before).abs().max()) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_and_a_pickle_of_an_optimizer_step_alike(form: Any) -> None:
    opt = fxprec.optim.AdamW(weights(shapes=SHAPES), lr=0.01, states=form)
    train(opt, 0, 2)
    others = [copy.deepcopy(opt), through_file(opt, weights_only=False)]
    for each in (opt, *others):
        train(each, 2, 2)
        assert same(values(opt), values(each))


@pytest.mark.parametrize("form", FORMS)
def test_blocks_follow_the_order_of_a_parameters_memory(form: Any) -> None:
    """One training of a contiguous weight, of a channels-last one, and of one that becomes so on the way."""
    start = torch.randn(8, 16, 3, 3, generator=torch.Generator().manual_seed(1))

    def run(order: int | None) -> tuple[Tensor, Any]:
        p = nn.Parameter(start.clone())
        if order == 0:
            p.data = p.data.to(memory_format=torch.channels_last)
        opt = fxprec.optim.AdamW([p], lr=0.01, states=form, update="nearest")
        for step in range(6):
            if step == order:
                p.data = p.data.to(memory_format=torch.channels_last)
            train(opt, step, 1)
        assert opt.state_dict()["state"][0][MEAN].stride() == p.stride()
        return p.detach(), opt

    plain, last, changed = (run(order)[0] for order in (None, 0, 3))
    for other in (last, changed):
        off = (plain - other).abs()
        assert float(off.max()) < 0.01 if form == "8bit" else float(off.mean()) < 0.01
    with_gaps = nn.Parameter(torch.zeros(8, 16, 3, 6)[..., ::2].copy_(start))
    opt = fxprec.optim.AdamW([with_gaps], lr=0.01, states=form, update="nearest")
    train(opt, 0, 6)
    assert torch.equal(with_gaps.detach(), plain)


@pytest.mark.parametrize("form", FORMS)
def test_a_channels_last_weight_resumes_from_a_contiguous_state(form: Any) -> None:
    def make(p: Tensor) -> Any:
        return fxprec.optim.AdamW([nn.Parameter(p)], lr=0.01, states=form, update="nearest")

    opt = make(torch.randn(8, 16, 3, 3).to(memory_format=torch.channels_last))
    train(opt, 0, 3)
    saved = copy.deepcopy(opt.state_dict())
    state = {k: v.contiguous() for k, v in saved["state"][0].items()}
    other = make(values(opt)[0].clone(memory_format=torch.preserve_format))
    other.load_state_dict({**saved, "state": {0: state}})
    for each in (opt, other):
        train(each, 3, 2)
    assert torch.equal(*values(opt), *values(other))


@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_are_not_finite_reach_the_weights_of_their_block_alone(form: Any) -> None:
    p = nn.Parameter(torch.ones(3 * states.BLOCK))
    opt = fxprec.optim.AdamW([p], lr=0.01, states=form)
    for bad in (torch.nan, 0.0):
        p.grad = torch.ones_like(p)
        p.grad[70] += bad
        opt.step()
    assert blocks(p.detach()).isnan().all(1).tolist() == [False, True, False]
    assert blocks(p.detach()).isnan().any(1).tolist() == [False, True, False]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    exponents=st.lists(st.integers(-140, 40), min_size=1, max_size=3),
    held=st.sampled_from(["bf16", "8bit", "4bit"]),
    special=st.sampled_from([0.0, 1e-45, torch.inf, torch.nan]),
)
def test_any_gradients_step_alike_in_kernel_and_reference(
    sizes: list[int], exponents: list[int], held: Any, special: float
) -> None:
    found = []
    for foreach in (None, False):
        params = [nn.Parameter(torch.ones(n)) for n in sizes]
        opt = fxprec.optim.AdamW(params, lr=0.01, states=held, foreach=foreach)
        for step, exponent in enumerate(exponents):
            g = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=g).mul_(2.0 ** (exponent // 2)).mul_(2.0 ** -(-exponent // 2))
                p.grad[: step * 3] = special
            opt.step()
        found.append([t for p in params for t in (p.detach(), *opt.state[p].values()) if isinstance(t, Tensor)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.nan_to_num(1e30), b.nan_to_num(1e30))


@pytest.mark.parametrize("form", FORMS)
def test_no_update_explodes_next_to_a_gradient_a_million_times_larger(form: Any) -> None:
    """A second moment that rounds to zero would make a step of mean / eps."""
    p = nn.Parameter(torch.zeros(states.BLOCK))
    opt = fxprec.optim.AdamW([p], lr=1.0, states=form, weight_decay=0)
    g = torch.Generator().manual_seed(0)
    last = p.detach().clone()
    for _ in range(200):
        p.grad = torch.randn(states.BLOCK, generator=g) * 10.0 ** -torch.linspace(0, 8, states.BLOCK)
        opt.step()
        assert float((p.detach() - last).abs().max()) < 8
        last = p.detach().clone()


def test_unknown_states_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown states of group 0 '8bits'; did you mean '8bit'.*or None"):
        fxprec.optim.AdamW(weights(shapes=SHAPES), states="8bits")  # type: ignore[arg-type]


def test_a_beta_that_rounds_to_one_is_taken_where_averages_are_wider_than_weights() -> None:
    with pytest.raises(ConfigError, match=r"betas\[1\]"):
        fxprec.optim.AdamW(weights(torch.bfloat16, SHAPES))
    fxprec.optim.AdamW(weights(torch.bfloat16, SHAPES), states="8bit")
