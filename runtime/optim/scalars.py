"""Compute the numbers of a step that change while training: learning rate, bias corrections, keys of random bits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fxprec.runtime import on_device
from fxprec.runtime.optim.rounding import keys_of
from fxprec.runtime.optim.rule import INTEGERS, Rule


def floats(rule: Rule, group: Mapping[str, Any], steps: Tensor) -> Tensor:
    """Return float32 (parameters, `Rule.scalars`) on the device of ``steps`` (float, (parameters,), counted from 1).

    The clipping factor is 1 here. Numbers are computed in float64, as torch.optim does with Python's floats. No value
    is read back from a device.
    """
    count = steps.double()
    values = {"clip": 1.0} | _ALGORITHMS[rule.algorithm](group, count)
    return torch.stack([_column(values[name], count) for name in rule.scalars], 1).float()


def _column(value: float | Tensor, like: Tensor) -> Tensor:
    """Return a value for each parameter. A number is filled in on the device instead of uploaded."""
    return value.to(like).expand_as(like) if isinstance(value, Tensor) else torch.full_like(like, value)


def _sgd(group: Mapping[str, Any], count: Tensor) -> dict[str, Any]:
    return {
        "neg_lr": -_scalar(group["lr"], count),
        "momentum": group["momentum"],
        "undamped": 1 - group["dampening"],
        "weight_decay": group["weight_decay"],
        "first": count == 1,
    }


def _adamw(group: Mapping[str, Any], count: Tensor) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    lr = _scalar(group["lr"], count)
    correction = 1 - beta1**count
    if isinstance(lr, Tensor):
        correction = correction.to(lr.dtype)  # torch.optim divides in the dtype of a tensor learning rate
    return {
        "neg_step_size": -(lr / correction),
        "decay": 1 - lr * group["weight_decay"],
        "neg_lr_decay": -(lr * group["weight_decay"]),
        "lerp": _lerp(1 - beta1),
        "beta2": beta2,
        "rest2": 1 - beta2,
        "root2": (1 - beta2**count) ** 0.5,
        "eps": group["eps"],
    }


def _lion(group: Mapping[str, Any], count: Tensor) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    lr = _scalar(group["lr"], count)
    return {
        "neg_lr": -lr,
        "decay": 1 - lr * group["weight_decay"],
        "neg_lr_decay": -(lr * group["weight_decay"]),
        "beta1": beta1,
        "rest1": 1 - beta1,
        "beta2": beta2,
        "rest2": 1 - beta2,
    }


def _muon_direction(group: Mapping[str, Any], count: Tensor) -> dict[str, Any]:
    return {"lerp": _lerp(1 - group["momentum"]), "lerp_ahead": _lerp(group["momentum"])}


def _lerp(weight: float) -> float:
    """Return the factor of `torch.lerp`'s difference. From 0.5 on, `torch.lerp` starts from the end, in float32."""
    return weight if weight < 0.5 else float(1 - torch.tensor(weight, dtype=torch.float32, device="cpu"))


def _muon_move(group: Mapping[str, Any], count: Tensor) -> dict[str, Any]:
    """Return the scalars of Muon's move; ``rate_of_shape`` in the group is the factor of the learning rate."""
    lr = _scalar(group["lr"], count)
    lr = lr.double() if isinstance(lr, Tensor) else lr  # torch.optim.Muon converts it to a Python float
    return {
        "neg_lr": -(lr * group["rate_of_shape"]),
        "decay": 1 - lr * group["weight_decay"],
        "neg_lr_decay": -(lr * group["weight_decay"]),
    }


_ALGORITHMS = {
    "sgd": _sgd,
    "adamw": _adamw,
    "lion": _lion,
    "muon direction": _muon_direction,
    "muon move": _muon_move,
}


def _scalar(lr: float | Tensor, like: Tensor) -> float | Tensor:
    """Return a tensor learning rate as a scalar on the device of ``like``; return a number unchanged."""
    return on_device.upload(lr.detach().reshape(()), like.device) if isinstance(lr, Tensor) else lr


def integers(seed: int, places: list[tuple[int, ...]] | None, steps: Tensor) -> Tensor:
    """Return int32 (parameters, `INTEGERS`): keys from the seed and each parameter's place, and the step.

    Without places, if nothing is random, return zeros.
    """
    if places is None:
        return torch.zeros(len(steps), len(INTEGERS), dtype=torch.int32, device=steps.device)
    keys = _keys(seed, tuple(places), steps.device)
    return torch.cat([keys, steps.to(torch.int32)[:, None]], 1)


@lru_cache(maxsize=64)
def _keys(seed: int, places: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    keys = torch.tensor([keys_of(seed, *place) for place in places], dtype=torch.int32, device="cpu")
    return on_device.upload(keys, device)
