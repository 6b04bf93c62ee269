"""What ``update=`` does: stochastic rounding, Kahan's compensation, cancelled updates."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import fxprec
from fxprec.numerics.directed import dithered
from fxprec.numerics.formats import BF16, parse
from fxprec.numerics.rows import format_row
from fxprec.runtime.optim.rounding import nearest, random_bits, stochastic


def bf16(x: Any) -> np.ndarray:
    """Rounded to bf16 by ml_dtypes, as float32."""
    return np.asarray(x, dtype=np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def bits(n: int, step: int = 0, keys: tuple[int, int] = (7, 8)) -> torch.Tensor:
    return random_bits(torch.arange(n, dtype=torch.int32), *(torch.tensor(k, dtype=torch.int32) for k in (*keys, step)))


@pytest.mark.parametrize("fmt", ["bf16", "1-8-3:ieee", "1-8-1:ieee", "fp16", "1-5-2"])
def test_the_short_forms_are_the_codecs(fmt: str) -> None:
    """Every exponent, both signs, values beside the largest, subnormals, inf and NaN."""
    x = torch.arange(-(2**31), 2**31, 40_961).to(torch.int32).view(torch.float32)
    special = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.39e38, 3.3961e38, 65519.0, 1e-45]
    x = torch.cat([x, torch.tensor(special)])
    f, random = parse(fmt), bits(len(x))
    for found, wanted in (
        (nearest(x, f), fxprec.quantize(x, f)),
        (stochastic(x, random, f), dithered(x, random, format_row(f))),
    ):
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.view(torch.int32)[~x.isnan()], wanted.view(torch.int32)[~x.isnan()])


def test_stochastic_rounding_is_unbiased() -> None:
    """A million draws of one value: the mean within 4 standard errors, for shares from 1/1024 to a half."""
    n = 1_000_000
    for share in (1 / 1024, 0.1, 0.5, 0.9):
        x = 1 + share * 2.0**-7
        rounded = stochastic(torch.full((n,), x), bits(n), BF16)
        assert set(rounded.unique().tolist()) == {1.0, 1 + 2.0**-7}
        error = 2.0**-7 * (share * (1 - share) / n) ** 0.5
        assert abs(float(rounded.double().mean()) - x) < 4 * error


def test_draws_are_independent_over_elements_steps_and_parameters() -> None:
    """Correlations of a million draws lie within 4 standard errors; so does each of 64 cells of pairs."""
    n = 1_000_000
    u = bits(n).double() / 2**31
    others = [bits(n, step=1), bits(n, step=2), bits(n, keys=(9, 8)), bits(n, keys=(7, 9))]
    pairs = [(u[lag:], u[:-lag]) for lag in (1, 2, 3, 8, 1024)] + [(u, o.double() / 2**31) for o in others]
    for a, b in pairs:
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4 / n**0.5
        cells = torch.bincount(((a * 8).long() * 8 + (b * 8).long()), minlength=64).double()
        assert float(((cells - len(a) / 64) / (len(a) / 64) ** 0.5).abs().max()) < 5
    for bit in range(31):  # each bit on its own
        ones = float(((bits(n) >> bit) & 1).double().mean())
        assert abs(ones - 0.5) < 4 * 0.5 / n**0.5


def test_random_bits_are_reproducible_from_seed_or_generator_and_change_with_steps() -> None:
    def run(**options: Any) -> list[list[float]]:
        p = torch.nn.Parameter(torch.ones(512, dtype=torch.bfloat16))
        opt = fxprec.optim.SGD([p], lr=1e-3, **options)
        seen = []
        for _ in range(2):
            before = p.detach().clone()
            p.grad = torch.ones_like(p)
            opt.step()
            seen.append((p.detach() != before).tolist())
        return seen

    first, second = run(seed=3)
    assert run(seed=3) == [first, second]
    assert first != second
    assert run(seed=4)[0] != first
    with_generator = [run(generator=torch.Generator().manual_seed(9)) for _ in range(2)]
    assert with_generator[0] == with_generator[1] != run()
    assert 0.05 < sum(first) / 512 < 0.5  # 1e-3 of a gap of 2^-8 below 1: a quarter moves


def test_updates_that_nearest_cancels_arrive_on_average() -> None:
    def mean_after(update: str) -> float:
        p = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        opt = fxprec.optim.SGD([p], lr=1e-4, update=update, count_cancelled=True)  # type: ignore[arg-type]
        for _ in range(200):
            p.grad = torch.ones_like(p)
            opt.step()
        return float(p.detach().double().mean())

    with pytest.warns(fxprec.FxprecWarning, match="can never move"):
        assert mean_after("nearest") == 1.0
    assert abs(mean_after("kahan") - 0.98) < 2.0**-8  # within a unit: the rest is in the compensation
    assert abs(mean_after("stochastic") - 0.98) < 4 * (200 * 1e-4 * 2.0**-8 / 4096) ** 0.5


def test_sgd_with_kahan_is_the_papers_algorithm_3() -> None:
    rng = np.random.default_rng(0)
    w = bf16(rng.normal(size=500))
    m, c = np.zeros_like(w), np.zeros_like(w)
    p = torch.nn.Parameter(torch.from_numpy(w.copy()).bfloat16())
    opt = fxprec.optim.SGD([p], lr=0.01, momentum=0.9, weight_decay=1e-3, update="kahan")
    lr, mu, decay = np.float32(0.01), np.float32(0.9), np.float32(1e-3)
    for _ in range(50):
        g = bf16(rng.normal(size=500))
        p.grad = torch.from_numpy(g.copy()).bfloat16()
        opt.step()
        g = bf16((g.astype(np.float64) + decay.astype(np.float64) * w).astype(np.float32))
        m = bf16((g.astype(np.float64) + (mu * m).astype(np.float64)).astype(np.float32))
        y = bf16(bf16(-lr * m) - c)
        s = bf16(w + y)
        c, w = bf16(bf16(s - w) - y), s
    assert np.array_equal(p.detach().float().numpy(), w)
    assert np.array_equal(opt.state[p]["compensation"].float().numpy(), c)


def test_adamw_with_kahan_is_the_papers_algorithm_5() -> None:
    rng = np.random.default_rng(1)
    w = bf16(rng.normal(size=500))
    m, v, c = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    p = torch.nn.Parameter(torch.from_numpy(w.copy()).bfloat16())
    opt = fxprec.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.98), weight_decay=0.1, update="kahan")
    one = np.float32(1)
    for t in range(1, 51):
        g = bf16(rng.normal(size=500))
        p.grad = torch.from_numpy(g.copy()).bfloat16()
        opt.step()
        rest1, rest2 = np.float32(1 - 0.9), np.float32(1 - 0.98)
        m = bf16((m + rest1.astype(np.float64) * (g - m)).astype(np.float32))
        v = bf16(((rest2 * g).astype(np.float64) * g + np.float32(0.98) * v).astype(np.float32))
        root = bf16(np.sqrt(v) / np.float32((1 - 0.98**t) ** 0.5))
        change = np.float32(-(1e-3 / (1 - 0.9**t))) * m / (root + np.float32(1e-8))
        u = bf16((change + np.float32(-1e-3 * 0.1).astype(np.float64) * w).astype(np.float32))
        y = bf16(u - c)
        s = bf16(w + y)
        c, w = bf16(bf16(s - w) - y), s
    assert one == 1
    assert np.array_equal(p.detach().float().numpy(), w)
    assert np.array_equal(opt.state[p]["compensation"].float().numpy(), c)


def test_every_stored_number_is_one_of_the_format() -> None:
    p = torch.nn.Parameter(torch.randn(1000))
    opt = fxprec.optim.AdamW([p], lr=0.01, betas=(0.5, 0.6), format="1-8-3:ieee", update="stochastic+kahan")
    for _ in range(5):
        p.grad = torch.randn(1000)
        opt.step()
    for t in (p.detach(), *(opt.state[p][name] for name in ("exp_avg", "exp_avg_sq", "compensation"))):
        assert torch.equal(t, fxprec.quantize(t, "1-8-3:ieee"))


def test_cancelled_updates_are_counted() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0, 100.0], dtype=torch.bfloat16))
    opt = fxprec.optim.SGD([("w", p)], lr=0.01, update="nearest", count_cancelled=True)
    p.grad = torch.tensor([0.0, 0.01, 1.0, 1.0], dtype=torch.bfloat16)  # none, lost, arrives, lost
    with pytest.warns(fxprec.FxprecWarning, match="can never move the largest weight of group 0: 100.0"):
        opt.step()
    (row,) = opt.cancelled(reset=True)
    assert (row.name, row.nonzero, row.cancelled) == ("parameter 'w'", 3, 2)
    assert row.share == pytest.approx(2 / 3)
    (row,) = opt.cancelled()
    assert (row.nonzero, row.share) == (0, 0.0)


def stuck_net(count_cancelled: bool | int) -> tuple[torch.nn.Module, fxprec.optim.SGD]:
    """Two layers in bf16 whose gradient of 1 moves a weight of 1e-4 and cannot move one of 1."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).bfloat16()
    for p, value in zip(net.parameters(), (1e-4, 1.0, 1.0, 1.0), strict=True):
        torch.nn.init.constant_(p, value)
        p.grad = torch.ones_like(p)
    opt = fxprec.optim.SGD(net.named_parameters(), lr=1e-5, update="nearest", count_cancelled=count_cancelled)
    return net, opt


@pytest.mark.filterwarnings("ignore:.*lr=1e-05")
def test_cancelled_updates_by_layer_and_over_time() -> None:
    net, opt = stuck_net(2)
    for step in range(5):
        if step == 2:
            torch.nn.init.constant_(net[0].weight, 1.0)
        opt.step()
    assert [(row.name, row.nonzero, row.cancelled) for row in opt.cancelled(by="layer")] == [
        ("0", 45, 33),  # 6 weights that move for two steps, and 3 biases that never do
        ("1", 20, 20),
    ]
    first, second = opt.cancelled_over_time(by="layer")
    assert (first.last_step, second.last_step) == (2, 4), "the fifth step is not kept yet"
    assert [row.share for row in first.rows] == [1 / 3, 1]
    assert [row.share for row in second.rows] == [1, 1]
    opt.cancelled(reset=True)
    opt.step()
    (*_, third) = opt.cancelled_over_time()
    assert [(row.nonzero, row.name) for row in third.rows][:2] == [
        (6, "parameter '0.weight'"),
        (3, "parameter '0.bias'"),
    ]


@pytest.mark.filterwarnings("ignore:.*lr=1e-05")
def test_layers_need_names_and_counts_a_number_of_steps() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = fxprec.optim.SGD([p], lr=1e-2, count_cancelled=True)
    opt.step()
    assert opt.cancelled_over_time() == []
    with pytest.raises(
        fxprec.ConfigError, match=r"parameter 0 has no name.* give the optimizer model.named_parameters"
    ):
        opt.cancelled(by="layer")
    with pytest.raises(fxprec.ConfigError, match=r"count_cancelled is -1; give it True, or a number of steps"):
        fxprec.optim.SGD([p], count_cancelled=-1)
