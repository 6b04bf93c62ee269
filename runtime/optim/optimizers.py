"""Optimizers with weights and state in any format: `SGD`, `AdamW` and `Muon` of torch.optim, and `Lion`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from fxprec import compat
from fxprec.errors import ConfigError
from fxprec.runtime.optim.options import Own, name_of, own_defaults
from fxprec.runtime.optim.orthogonal import QUINTIC, AdjustRate, orthogonalised, rate_of_shape
from fxprec.runtime.optim.rule import Rule
from fxprec.runtime.optim.stepper import Numbers, Stepper


class SGD(Stepper, torch.optim.SGD):
    """``torch.optim.SGD`` for 16-bit (or narrower) weights; Zamirai et al. 2020, Algorithms 2 and 3.

    Options are those of torch.optim.SGD and of `Own`: rounding of weights, the form of averages, clipping.
    ``foreach=False`` runs the plain reference op by op; any other value runs one kernel for all parameters of a group.

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
        **own: Unpack[Own],
    ) -> None:
        self._own = own_defaults(**own)
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


class AdamW(Stepper, torch.optim.AdamW):
    """``torch.optim.AdamW`` for 16-bit (or narrower) weights; Zamirai et al. 2020, Algorithms 4 and 5.

    Options are those of torch.optim.AdamW and of `Own`, as for `SGD`. With bf16 weights torch's default beta2 of 0.999
    rounds to 1, so it is refused unless ``states`` is given; the paper takes 0.997. Raises `ConfigError`.
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
        **own: Unpack[Own],
    ) -> None:
        self._own = own_defaults(**own)
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


class Lion(Stepper):
    """Lion: each weight moves by the learning rate along the sign of an average of gradients, its only average.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2. torch.optim has no Lion.
    Options beside ``lr``, ``betas`` and ``weight_decay`` (decoupled) are those of `SGD`. Raises `ConfigError`.
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
        **own: Unpack[Own],
    ) -> None:
        self._own = own_defaults(**own)
        betas = (float(betas[0]), float(betas[1]))
        if not (lr >= 0 and weight_decay >= 0):
            raise ConfigError(f"lr is {float(lr)} and weight_decay {weight_decay}; give both 0 or more")
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"betas are {betas}; give two numbers from 0 to below 1")
        given = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, "foreach": foreach}
        super().__init__(params, {**given, "capturable": capturable, "differentiable": False})


class Muon(Stepper, torch.optim.Muon):
    """``torch.optim.Muon`` for matrices of 16 bits, or of any format; Jordan et al. 2024.

    Options are those of torch.optim.Muon and of `Own`. Parameters are stepped one by one: a generated kernel computes
    the momentum, matrix products in bfloat16 orthogonalise it, and a second kernel moves the weight. Raises
    `ConfigError` for a parameter that is no matrix or is sharded, and for what docs/optim.md lists under "What is
    refused".
    """

    _algorithm = "muon"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustRate | None = None,
        *,
        foreach: bool | None = None,
        **own: Unpack[Own],
    ) -> None:
        self._own = {**own_defaults(**own), "foreach": foreach, "differentiable": False}
        super().__init__(
            params,
            lr=lr,  # type: ignore[arg-type]  # torch takes a tensor too
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )

    def _check_group(self, group: dict[str, Any], position: int) -> None:
        super()._check_group(group, position)
        for index, param in enumerate(group["params"]):
            name = f"{name_of(group, index)} of group {position}"
            if param.dim() != 2:
                raise ConfigError(
                    f"{name} has {param.dim()} dimensions, and Muon steps matrices; give it to an AdamW, and both "
                    "optimizers to the model: options={'optimizer': [muon, adamw]}"
                )
            if isinstance(param, DTensor):
                raise ConfigError(
                    f"{name} is sharded, and Muon needs whole matrices; give it to an AdamW, or use torch.optim.Muon"
                )

    def workspace_of(self, param: Tensor) -> int:
        """Return the bytes of bfloat16 matrices: two of the parameter's shape and one of its shorter side squared.

        A CPU that emulates bfloat16 also takes a float32 matrix of the parameter's shape for a product.
        """
        emulated = 4 * param.numel() if param.device.type == "cpu" and compat.emulates_bf16() else 0
        return 2 * (2 * param.numel() + min(param.shape) ** 2) + emulated

    def _run(
        self, rule: Rule, group: Mapping[str, Any], rows: list[list[Tensor]], numbers: Numbers, counts: list[Tensor]
    ) -> None:
        move = replace(rule, algorithm="muon move", clipped=False, states=None)
        for i, row in enumerate(rows):
            own, tensors = numbers.of(i), dict(zip((*rule.tensors, *rule.scales), row, strict=True))
            param = tensors["param"]
            # No variable refers to the matrix that is orthogonalised, so its memory is free after the first product.
            along = orthogonalised(
                self._direction(rule, group, tensors, own), group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
            shaped = {**group, "rate_of_shape": rate_of_shape(group["adjust_lr_fn"], *param.shape)}
            moved = [param, along, *(tensors[name] for name in move.state)]
            super()._run(move, shaped, [moved], own, counts[i : i + 1])

    def _direction(
        self, rule: Rule, group: Mapping[str, Any], tensors: Mapping[str, Tensor], numbers: Numbers
    ) -> Tensor:
        """Average a gradient into the momentum; return the matrix to orthogonalise."""
        average = replace(rule, algorithm="muon direction", update="nearest", statistics=False)
        made = torch.empty_like(tensors["param"], dtype=torch.bfloat16, requires_grad=False)
        held = (tensors[name] for name in (*average.state, *average.scales))
        super()._run(average, group, [[made, tensors["grad"], *held]], numbers, [])
        return made
