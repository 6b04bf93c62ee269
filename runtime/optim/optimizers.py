"""`SGD` and `AdamW`, torch.optim's, and `Lion`: with weights and state in any format."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fxprec.errors import ConfigError
from fxprec.numerics.formats import Format
from fxprec.runtime.optim.options import own_defaults
from fxprec.runtime.optim.rule import Norm, States, Update
from fxprec.runtime.optim.stepper import Stepper


class SGD(Stepper, torch.optim.SGD):
    """``torch.optim.SGD`` for 16-bit (or narrower) weights; Zamirai et al. 2020, Algorithms 2 and 3.

    Every option of torch.optim.SGD, and per param group:

    ``update``: how the new weight is rounded: ``"nearest"``, ``"stochastic"``, ``"kahan"`` (a compensation of the
    weight's size is kept) or ``"stochastic+kahan"``. ``format``: a `Format` or its name that weights and state are
    rounded to; None takes that of each parameter's dtype. ``states``: what averages are held in: ``"float32"``,
    ``"bf16"``, ``"8bit"`` or ``"4bit"``; ``"auto"`` leaves that to a step budget, and is ``"float32"`` without one;
    None rounds them to ``format``, as the paper does. ``error_if_nonfinite``: raise `GradientError` before anything is
    changed.
    ``count_cancelled``: count what `cancelled` returns; a number of steps: how often `cancelled_over_time` keeps it.
    ``max_norm``: clip gradients by their global norm, with norm="exact" as `torch.nn.utils.clip_grad_norm_` does, with
    norm="last" by the last step's norm, or by a gradient's own where that is larger; the same for all groups.
    ``seed`` or ``generator`` (from which one seed is drawn) decide the random bits, which are a function of seed,
    parameter, element and step: the same on all ranks that use the same seed, 0 by default.
    ``foreach=False`` runs the plain reference op by op; any other value one kernel for all parameters of a group.

    Raises `ConfigError` (a ``ValueError``) for what docs/optim.md lists under "What is refused".
    """

    _algorithm = "sgd"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        update: Update = "stochastic",
        format: Format | str | None = None,
        states: States | Literal["auto"] | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        error_if_nonfinite: bool = False,
        count_cancelled: bool | int = False,
        max_norm: float | None = None,
        norm: Norm = "exact",
    ) -> None:
        self._own = own_defaults(
            update, format, states, generator, seed, error_if_nonfinite, count_cancelled, max_norm, norm
        )
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
        )
        self.defaults |= self._own


class AdamW(Stepper, torch.optim.AdamW):
    """``torch.optim.AdamW`` for 16-bit (or narrower) weights; Zamirai et al. 2020, Algorithms 4 and 5.

    Every option of torch.optim.AdamW; the others are those of `SGD`. With bf16 weights torch's default beta2 of 0.999
    rounds to 1 and is refused unless ``states`` says otherwise: the paper takes 0.997. Raises `ConfigError`.
    """

    _algorithm = "adamw"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        update: Update = "stochastic",
        format: Format | str | None = None,
        states: States | Literal["auto"] | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        error_if_nonfinite: bool = False,
        count_cancelled: bool | int = False,
        max_norm: float | None = None,
        norm: Norm = "exact",
    ) -> None:
        self._own = own_defaults(
            update, format, states, generator, seed, error_if_nonfinite, count_cancelled, max_norm, norm
        )
        betas = (float(betas[0]), float(betas[1]))
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
        )
        self.defaults |= self._own


class Lion(Stepper):
    """Lion: each weight moves by the learning rate, along the sign of an average of gradients; one average is held.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2. torch.optim has none. The
    options beside ``lr``, ``betas`` and ``weight_decay`` (decoupled) are those of `SGD`. Raises `ConfigError`.
    """

    _algorithm = "lion"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        update: Update = "stochastic",
        format: Format | str | None = None,
        states: States | Literal["auto"] | None = None,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        error_if_nonfinite: bool = False,
        count_cancelled: bool | int = False,
        max_norm: float | None = None,
        norm: Norm = "exact",
    ) -> None:
        self._own = own_defaults(
            update, format, states, generator, seed, error_if_nonfinite, count_cancelled, max_norm, norm
        )
        betas = (float(betas[0]), float(betas[1]))
        if not (lr >= 0 and weight_decay >= 0):
            raise ConfigError(f"lr is {float(lr)} and weight_decay {weight_decay}; give both 0 or more")
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"betas are {betas}; give two numbers from 0 to below 1")
        given = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, "foreach": foreach}
        super().__init__(params, {**given, "capturable": capturable, "differentiable": False})
        self.defaults |= self._own
