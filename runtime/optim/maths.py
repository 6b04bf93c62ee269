"""Define the maths of a step once: eager torch runs it, Dynamo inlines it, and printers turn its trace into kernels.

Intermediate values are float32. Each numbered line of the paper's Algorithms 2 to 5 is one operation: it reads numbers
of the format, computes in float32, and rounds its result to nearest once. In float32 the operations are those of
torch.optim, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fxprec.numerics.formats import BF16, Format
from fxprec.runtime.optim import states
from fxprec.runtime.optim.fma import fma, sqrt
from fxprec.runtime.optim.rounding import nearest, random_bits, stochastic
from fxprec.runtime.optim.rule import CARRIERS, Rule

Values: TypeAlias = Mapping[str, Tensor]


class Stepped(NamedTuple):
    """New values by tensor name, and the masks that `Rule.statistics` counts: non-zero and cancelled updates."""

    values: dict[str, Tensor]
    nonzero: Tensor | None
    cancelled: Tensor | None


def step(rule: Rule, tensors: Values, scalars: Values, index: Tensor | None) -> Stepped:
    """Compute one step of one parameter. ``tensors``: float32 (n,) by `Rule.tensors`; ``scalars``: 0-dim by
    `Rule.scalars` and `INTEGERS`; ``index``: int32 (n,) element numbers, only read if `Rule.random`. New values of
    `Rule.coded` are not rounded: `states` encodes them once the largest value of a block is known."""
    grad = -tensors["grad"] if rule.maximize else tensors["grad"]
    if rule.clipped:
        grad = grad * scalars["clip"]
    if rule.clipped or CARRIERS[rule.carrier] != rule.format:
        grad = nearest(grad, rule.working)
    found = _ALGORITHMS[rule.algorithm](rule, grad, tensors, scalars, index)
    if rule.states == "bf16" and index is not None:
        for name in rule.averages:
            random, value = states.bits(name, index, scalars), found.values[name]
            found.values[name] = nearest(value, BF16) if random is None else stochastic(value, random, BF16)
    return found


def _sgd(rule: Rule, grad: Tensor, tensors: Values, scalars: Values, index: Tensor | None) -> Stepped:
    """Step by Algorithms 2 and 3, with torch's dampening and Nesterov momentum."""
    param, fmt = tensors["param"], rule.working
    state: dict[str, Tensor] = {}
    if rule.weight_decay:
        grad = nearest(fma(param, scalars["weight_decay"], grad), fmt)
    if rule.momentum:
        decayed = tensors["momentum_buffer"] * scalars["momentum"]
        buffer = nearest(fma(grad, scalars["undamped"], decayed), fmt)
        buffer = torch.where(scalars["first"] != 0, grad, buffer)
        state["momentum_buffer"] = buffer
        grad = nearest(fma(buffer, scalars["momentum"], grad), fmt) if rule.nesterov else buffer
    update = grad * scalars["neg_lr"]
    moved = fma(grad, scalars["neg_lr"], param)
    return _finish(rule, update, moved, state, tensors, scalars, index)


def _adamw(rule: Rule, grad: Tensor, tensors: Values, scalars: Values, index: Tensor | None) -> Stepped:
    """Step by Algorithms 4 and 5, with torch's bias correction (float32 scalars) and AMSGrad."""
    fmt = rule.working
    mean, square = tensors["exp_avg"], tensors["exp_avg_sq"]
    mean = nearest(_lerp(mean, grad, scalars["lerp"], rule.long_lerp), fmt)
    square = nearest(fma(grad * scalars["rest2"], grad, square * scalars["beta2"]), fmt)
    state = {"exp_avg": mean, "exp_avg_sq": square}
    if rule.amsgrad:
        square = state["max_exp_avg_sq"] = torch.maximum(tensors["max_exp_avg_sq"], square)
    denominator = nearest(sqrt(square) / scalars["root2"], fmt) + scalars["eps"]
    change = mean * scalars["neg_step_size"] / denominator
    return _decayed(rule, change, state, tensors, scalars, index)


def _lion(rule: Rule, grad: Tensor, tensors: Values, scalars: Values, index: Tensor | None) -> Stepped:
    """Step by Algorithm 2 of Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms". NaN's sign is NaN."""
    mean, fmt = tensors["exp_avg"], rule.working
    ahead = nearest(fma(grad, scalars["rest1"], mean * scalars["beta1"]), fmt)
    sign = torch.where(ahead > 0, 1.0, torch.where(ahead < 0, -1.0, ahead))
    state = {"exp_avg": nearest(fma(grad, scalars["rest2"], mean * scalars["beta2"]), fmt)}
    return _decayed(rule, sign * scalars["neg_lr"], state, tensors, scalars, index)


def _muon_direction(rule: Rule, grad: Tensor, tensors: Values, scalars: Values, index: Tensor | None) -> Stepped:
    """Compute the matrix that torch.optim.Muon orthogonalises and write it to ``param``, which is not read."""
    fmt = rule.working
    buffer = nearest(_lerp(tensors["momentum_buffer"], grad, scalars["lerp"], rule.long_lerp), fmt)
    ahead = nearest(_lerp(grad, buffer, scalars["lerp_ahead"], rule.long_ahead), fmt) if rule.nesterov else buffer
    return Stepped({"param": nearest(ahead, BF16), "momentum_buffer": buffer}, None, None)


def _muon_move(rule: Rule, grad: Tensor, tensors: Values, scalars: Values, index: Tensor | None) -> Stepped:
    """Move the weight along ``grad``, the orthogonalised matrix."""
    param, update, start = tensors["param"], grad * scalars["neg_lr"], tensors["param"]
    if rule.weight_decay:
        update = fma(param, scalars["neg_lr_decay"], update)
        start = param * scalars["decay"]
    return _finish(rule, update, fma(grad, scalars["neg_lr"], start), {}, tensors, scalars, index)


def _lerp(start: Tensor, end: Tensor, share: Tensor, is_long: bool) -> Tensor:
    """Return torch.lerp; with ``is_long`` it starts from the end, and ``share`` is the share of ``start``."""
    return fma(start - end, share, end) if is_long else fma(end - start, share, start)


_ALGORITHMS = {
    "sgd": _sgd,
    "adamw": _adamw,
    "lion": _lion,
    "muon direction": _muon_direction,
    "muon move": _muon_move,
}


def _decayed(
    rule: Rule, change: Tensor, state: dict[str, Tensor], tensors: Values, scalars: Values, index: Tensor | None
) -> Stepped:
    """Apply weight decay to the parameter and add ``change``."""
    param = tensors["param"]
    update, start = change, param
    if rule.weight_decay:
        update = fma(param, scalars["neg_lr_decay"], change)
        start = param * scalars["decay"]
    return _finish(rule, update, start + change, state, tensors, scalars, index)


def _finish(
    rule: Rule,
    update: Tensor,
    moved: Tensor,
    state: dict[str, Tensor],
    tensors: Values,
    scalars: Values,
    index: Tensor | None,
) -> Stepped:
    """Round the new weight and count the update; ``moved`` is param + update in float32, as torch computes it."""
    param, fmt = tensors["param"], rule.format
    random = None
    if rule.stochastic and index is not None:
        random = random_bits(index, scalars["key0"], scalars["key1"], scalars["step"])
    if not rule.kahan:
        new = _rounded(moved, random, fmt)
        lost = new == param
    else:
        old = tensors["compensation"]
        y = nearest(nearest(update, fmt) - old, fmt)
        new = _rounded(param + y, random, fmt)
        state["compensation"] = nearest(nearest(new - param, fmt) - y, fmt)
        lost = (new == param) & (state["compensation"] == old)
    values = {"param": new, **state}
    if not rule.statistics:
        return Stepped(values, None, None)
    nonzero = update != 0
    return Stepped(values, nonzero, nonzero & lost)


def _rounded(x: Tensor, random: Tensor | None, fmt: Format) -> Tensor:
    return nearest(x, fmt) if random is None else stochastic(x, random, fmt)
