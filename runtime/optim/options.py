"""Define and check the options that the optimizers take beyond torch.optim's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from fxprec.config.checks import above_zero, one_of
from fxprec.errors import ConfigError
from fxprec.numerics.formats import Format, parse
from fxprec.runtime.optim.rounding import nearest
from fxprec.runtime.optim.rule import (
    AUTO,
    CARRIERS,
    NORMS,
    STATES,
    UPDATES,
    Algorithm,
    Gradients,
    Norm,
    Rule,
    States,
    Update,
)


class Own(TypedDict, total=False):
    """Options of fxprec's optimizers beyond torch.optim's; all but ``generator`` can be set per param group.

    The random bits are a function of seed, parameter, element and step: the same on all ranks that use the same seed.
    """

    update: Update
    """How the new weight is rounded: "stochastic" (default), "nearest", "kahan" (a compensation of the weight's size
    is kept) or "stochastic+kahan"."""
    format: Format | str | None
    """Format that weights and state are rounded to; None: the format of each parameter's dtype."""
    states: States | Literal["auto"] | None
    """Form that averages are kept in. "auto" leaves the form to a step budget, and is "float32" without one. None
    rounds averages to ``format``, as the paper does."""
    gradients: Gradients | None
    """Format that gradients are summed in until ``step()``, over several backward passes too, for a model compiled with
    option ``optimizer``. None: backward steps parameters; where it cannot, it keeps the gradient in its own dtype."""
    generator: torch.Generator | None
    """Generator from which one seed is drawn."""
    seed: int | None
    """Seed of the random bits, 0 by default."""
    error_if_nonfinite: bool
    """Whether a gradient with inf or NaN raises `GradientError` before anything is changed."""
    count_cancelled: bool | int
    """Whether updates are counted for `cancelled`; a number of steps: also the interval of `cancelled_over_time`."""
    max_norm: float | None
    """Global norm that gradients are clipped to; the same for all groups."""
    norm: Norm
    """Norm that decides: "exact" (default) as in `torch.nn.utils.clip_grad_norm_`; "last": that of the last step, or
    a gradient's own if that is larger."""


def own_defaults(
    update: str = "stochastic",
    format: Format | str | None = None,
    states: str | None = None,
    gradients: str | None = None,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    error_if_nonfinite: bool = False,
    count_cancelled: bool | int = False,
    max_norm: float | None = None,
    norm: str = "exact",
) -> dict[str, Any]:
    """Return the values of `Own` as plain data, which a state dict can have. Raises `ConfigError`."""
    if not isinstance(count_cancelled, int) or count_cancelled < 0:
        raise ConfigError(
            f"count_cancelled is {count_cancelled!r}; give it True, or a number of steps after which counts are kept"
        )
    if seed is not None and generator is not None:
        raise ConfigError("seed and generator are both given, and each decides the random bits; keep one of them")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ConfigError(f"seed is {seed!r}; give it an int")
    if generator is not None:
        seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
    return {
        "update": update,
        "format": None if format is None else parse(format).name,
        "states": states,
        "gradients": gradients,
        "seed": seed or 0,
        "error_if_nonfinite": error_if_nonfinite,
        "count_cancelled": count_cancelled,
        "max_norm": max_norm,
        "norm": norm,
        "last_norm": None,
    }


def check_group(group: dict[str, Any], position: int) -> None:
    """Check a new param group and normalise it. Raises `ConfigError` (see docs/optim.md, "What is refused")."""
    one_of(f"update of group {position}", group["update"], UPDATES)
    if group["states"] is not None:
        others = "or None for the format of the weights"
        one_of(f"states of group {position}", group["states"], (*STATES, AUTO), others)
    if group["gradients"] is not None:
        others = "or None to step parameters in backward"
        one_of(f"gradients of group {position}", group["gradients"], ("bf16",), others)
    one_of(f"norm of group {position}", group["norm"], NORMS)
    if group["max_norm"] is not None:
        above_zero(f"max_norm of group {position}", group["max_norm"], "a number above 0, or None")
    if group["format"] is not None:
        group["format"] = parse(group["format"]).name
    if group.get("differentiable"):
        raise ConfigError("differentiable=True is impossible: rounding has no derivative; use torch.optim for that")
    if group["error_if_nonfinite"] and group.get("capturable"):
        raise ConfigError("error_if_nonfinite waits for the device, which capturable=True forbids; drop one of them")
    for name, param in _named(group):
        _check_param(name, param, position)
        if group["gradients"] is not None and param.dtype == torch.float16:
            raise ConfigError(
                f"{name} of group {position} is float16, whose gradient takes as many bytes in bf16, with 3 mantissa "
                "bits less; drop gradients='bf16', or convert it with .float()"
            )
    _check_formats(group, position)
    if group["states"] is not None:
        return
    for fmt in {format_of(group, param.dtype) for param in group["params"]}:
        _check_betas(group, fmt, position)


def format_of(group: Mapping[str, Any], dtype: torch.dtype) -> Format:
    """Return the format of a parameter of ``dtype``: the group's format, or that of the dtype."""
    return CARRIERS[dtype] if group["format"] is None else parse(group["format"])


def name_of(group: Mapping[str, Any], index: int) -> str:
    """Return the name of a parameter in messages."""
    names = group.get("param_names")
    return f"parameter {names[index]!r}" if names else f"parameter {index}"


def check_one_norm(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` if param groups are clipped differently, because the norm is that of all gradients."""
    for name in ("max_norm", "norm"):
        for position, group in enumerate(groups):
            if group[name] != groups[0][name]:
                raise ConfigError(
                    f"{name}={group[name]!r} of group {position}, and {groups[0][name]!r} of group 0: gradients are "
                    "clipped by the norm of all groups together; give it to the optimizer, or clip in an optimizer for "
                    "each group"
                )


def _named(group: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((name_of(group, i), param) for i, param in enumerate(group["params"]))


def _check_param(name: str, param: Tensor, position: int) -> None:
    if param.dtype in CARRIERS:
        return
    if param.is_complex():
        way_out = "give torch.view_as_real of it, or use torch.optim"
    elif param.is_floating_point():
        way_out = "steps are computed in float32: convert it with .float(), or use torch.optim"
    else:
        way_out = "only floating-point weights are trained: leave it out of the param groups"
    raise ConfigError(f"{name} of group {position} is {str(param.dtype)[6:]}; {way_out}")


def _check_formats(group: Mapping[str, object], position: int) -> None:
    params = list(_named(group))
    if group["format"] is None and len({param.dtype for _, param in params}) > 1:
        (first, one), (second, other) = params[0], next(p for p in params if p[1].dtype != params[0][1].dtype)
        raise ConfigError(
            f"group {position} mixes formats: {first} is {CARRIERS[one.dtype].name}, {second} is "
            f"{CARRIERS[other.dtype].name}; put them in groups of their own, or give the group one format="
        )
    for name, param in params:
        fmt, carrier = format_of(group, param.dtype), CARRIERS[param.dtype]
        if not carrier.contains(fmt):
            raise ConfigError(
                f"{name} of group {position} is {carrier.name}, which cannot hold every number of {fmt.name}; "
                f"convert it with .float(), or use format={carrier.name!r}"
            )


def _check_betas(group: Mapping[str, Any], fmt: Format, position: int) -> None:
    betas = {f"betas[{i}]": beta for i, beta in enumerate(group.get("betas", ()))}
    betas |= {"momentum": group["momentum"]} if "momentum" in group else {}
    for name, beta in betas.items():
        if beta < 1 and float(nearest(torch.tensor(float(beta), dtype=torch.float32, device="cpu"), fmt)) >= 1:
            raise ConfigError(
                f"{name}={float(beta)} of group {position} rounds to 1 in {fmt.name}: the average would never decay; "
                f"use less than {1 - 2.0 ** -(fmt.mantissa_bits + 2)} (the paper takes 0.997 for bf16)"
            )


def rule_of(group: Mapping[str, Any], algorithm: Algorithm, dtype: torch.dtype) -> Rule:
    """Return the rule of a group: everything that its kernel depends on."""
    adamw, sgd, muon = (algorithm == name for name in ("adamw", "sgd", "muon"))
    average = group["betas"][0] if adamw else group["momentum"] if muon else 1.0
    return Rule(
        algorithm=algorithm,
        update=group["update"],
        format=format_of(group, dtype),
        carrier=dtype,
        momentum=sgd and group["momentum"] != 0,
        nesterov=(sgd or muon) and bool(group["nesterov"]),
        weight_decay=bool(group["weight_decay"] != 0),
        maximize=bool(group.get("maximize")),
        amsgrad=adamw and bool(group["amsgrad"]),
        long_lerp=1 - average >= 0.5,
        long_ahead=muon and average >= 0.5,
        clipped=group["max_norm"] is not None,
        statistics=bool(group["count_cancelled"]),
        states=STATES[0] if group["states"] == AUTO else group["states"],
    )
