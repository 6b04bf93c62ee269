"""Check while training for gradients that are not finite and for a learning rate that can never move a weight."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxprec.errors import ConfigError, FxprecWarning, GradientError
from fxprec.runtime.optim.applied import is_held
from fxprec.runtime.optim.options import name_of
from fxprec.runtime.optim.orthogonal import rate_of_shape
from fxprec.runtime.optim.rounding import nearest
from fxprec.runtime.optim.rule import Rule
from fxprec.runtime.optim.sums import stored


def check_gradients(groups: list[dict[str, Any]]) -> None:
    """Raise `ConfigError` for sparse gradients, `GradientError` for non-finite ones under ``error_if_nonfinite``."""
    for position, group in enumerate(groups):
        given = [(i, stored(p.grad)) for i, p in enumerate(group["params"]) if is_held(p.grad)]
        for index, grad in given:
            if grad.layout != torch.strided:
                raise ConfigError(
                    f"the gradient of {name_of(group, index)} of group {position} is sparse, and only dense ones are "
                    "stepped; make the embedding with sparse=False"
                )
        if group["error_if_nonfinite"]:
            _check_finite(group, position, given)


def _check_finite(group: Mapping[str, object], position: int, given: list[tuple[int, Tensor]]) -> None:
    grads = [grad for _, grad in given if grad.numel()]
    norms = torch._foreach_norm(grads, float("inf")) if grads else []
    if all(bool(torch.isfinite(norm)) for norm in norms):
        return
    index = next(i for i, grad in given if not bool(torch.isfinite(grad).all()))
    raise GradientError(
        f"the gradient of {name_of(group, index)} of group {position} has inf or NaN; weights and state are as before "
        "this step: skip the batch, or lower the loss scale or learning rate"
    )


def warn_if_stuck(rule: Rule, group: Mapping[str, Any], position: int, indices: Sequence[int]) -> None:
    """Warn if rounding to nearest cancels every update that the group's largest weight can get.

    The bound on an update is learning rate * max(1, (1 - beta1) / sqrt(1 - beta2)) for AdamW and the learning rate for
    Lion. For SGD it follows from the largest gradient of this step. Weight decay is added.
    """
    sizes = [(float(p.detach().abs().max()), i) for i in indices if (p := group["params"][i]).numel()]
    if not sizes:
        return
    largest, owner = max(sizes)
    update = _largest_update(rule, group, indices, largest)
    ends = torch.tensor([largest - update, largest + update], dtype=torch.float64, device="cpu").float()
    weight = nearest(torch.tensor([largest, largest], dtype=torch.float32, device="cpu"), rule.format)
    if update > 0 and largest > 0 and torch.equal(nearest(ends, rule.format), weight):
        warnings.warn(
            f"lr={_peak_lr(group)} can never move the largest weight of group {position}: {largest} in "
            f"{name_of(group, owner)}; updates of at most {update:.3g} are cancelled by rounding to "
            f"{rule.format.name}; raise lr, or use update='kahan' or update='stochastic'",
            FxprecWarning,
            stacklevel=6,
        )


def _peak_lr(group: Mapping[str, Any]) -> float:
    """Return the largest learning rate that schedulers promise, because warm-up starts low."""
    return max(float(group[name]) for name in ("lr", "initial_lr", "max_lr") if group.get(name) is not None)


def _largest_update(rule: Rule, group: Mapping[str, Any], indices: Sequence[int], largest: float) -> float:
    lr, decay = _peak_lr(group), float(group["weight_decay"])
    if rule.algorithm == "adamw":
        beta1, beta2 = group["betas"]
        return lr * (max(1.0, float((1 - beta1) / (1 - beta2) ** 0.5)) + decay * largest)
    if rule.algorithm == "lion":
        return lr * (1 + decay * largest)
    if rule.algorithm == "muon":  # no element exceeds the largest singular value, about 1.2
        rate = max(rate_of_shape(group["adjust_lr_fn"], *group["params"][i].shape) for i in indices)
        return lr * (1.25 * rate + decay * largest)
    grads = [float(stored(group["params"][i].grad).abs().max()) for i in indices if group["params"][i].numel()]
    momentum = float(group["momentum"])
    return lr * (max(grads) + decay * largest) / ((1 - momentum) if momentum < 1 else 1)
