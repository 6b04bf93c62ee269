"""Training in which every operator's result is rounded, with the ways to update weights that the paper compares.

A tensor is float32 that holds numbers of the format. Results are rounded as operators write them, gradients as they come
back, weights by the optimizer, or, where they stay in 32 bits, as operators read them. Norms, activations and softmax are one operator each, as in the
paper's simulator; a view is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import fxprec
from fxprec.numerics.formats import BF16, FP16, Format

FP32, STANDARD, STOCHASTIC, KAHAN, BOTH = "32-bit", "standard", "stochastic", "Kahan", "stochastic and Kahan"
WIDE = "standard, 32-bit weights"
CASTS = {BF16: torch.bfloat16, FP16: torch.float16}
UPDATES = {STANDARD: "nearest", STOCHASTIC: "stochastic", KAHAN: "kahan", BOTH: "stochastic+kahan"}


def rounded(x: Tensor, fmt: Format | None) -> Tensor:
    """To nearest; as it is for None. The same bits as `fxprec.quantize`, without its checks where a cast will do."""
    if fmt is None:
        return x
    if fmt in CASTS:
        return x.to(CASTS[fmt]).float()
    if fmt.exponent_bits == 8 and fmt.specials == "ieee" and fmt.overflow != "saturate":
        return _shortened(x, 23 - fmt.mantissa_bits)
    return fxprec.quantize(x, fmt)


def _shortened(x: Tensor, bits: int) -> Tensor:
    """Without the last ``bits`` of float32's mantissa, ties to even; range and subnormals are float32's."""
    code = x.view(torch.int32)
    up = ((code >> bits) & 1) + ((1 << (bits - 1)) - 1)
    return torch.where(x.isnan(), x, ((code + up) & -(1 << bits)).view(torch.float32))


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: Format) -> Tensor:
        ctx.fmt = fmt
        return rounded(x, fmt)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return rounded(grad, ctx.fmt), None


class RoundEveryOperator(TorchFunctionMode):
    """Within it, what every torch function returns is rounded, and so is the gradient that comes back to it.

    With ``reads``, so are parameters where they are read, and their gradients; without, they must be numbers of the
    format, and the optimizer must round gradients (`fxprec.optim` does).
    """

    def __init__(self, fmt: Format, reads: bool) -> None:
        super().__init__()
        self.fmt, self.reads = fmt, reads
        self.read: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            with self:
                return attention(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if self.reads:
            args, kwargs = tree_map(self._operand, (args, kwargs))
        return tree_map(self._result, func(*args, **kwargs))

    def _operand(self, x: Any) -> Any:
        if not isinstance(x, nn.Parameter):
            return x
        if id(x) not in self.read:
            self.read[id(x)] = _Round.apply(x, self.fmt)
        return self.read[id(x)]

    def _result(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != torch.float32 or isinstance(x, nn.Parameter) or x._is_view():
            return x
        return _Round.apply(x, self.fmt)


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Attention as its operators, so that scores and weights are rounded too."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


class Training:
    """One run of a method; ``fmt`` is that of all operators, unless the method is in 32 bits.

    ``count_cancelled`` as `fxprec.optim` takes it.
    """

    def __init__(self, method: str, fmt: Format = BF16, count_cancelled: bool | int = False) -> None:
        self.method, self.fmt = method, None if method == FP32 else fmt
        self.count_cancelled = count_cancelled
        self.optimizer: Any = None

    def optimise(self, model: nn.Module, kind: str, schedule: Callable[[int], float], **options: Any) -> None:
        """Round the weights and make the optimizer; ``schedule`` maps a step to a factor of the learning rate."""
        if self.method in (FP32, WIDE):
            self.optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
        else:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(rounded(p, self.fmt))
            update = {"update": UPDATES[self.method], "format": self.fmt, "count_cancelled": self.count_cancelled}
            self.optimizer = getattr(fxprec.optim, kind)(model.named_parameters(), **update, **options)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)

    def forward(self, compute: Callable[..., Any], *inputs: Tensor) -> Any:
        """``compute(*inputs)``, every operator rounded, inputs too."""
        if self.fmt is None:
            return compute(*inputs)
        inputs = tuple(rounded(x, self.fmt) if x.dtype == torch.float32 else x for x in inputs)
        with RoundEveryOperator(self.fmt, reads=self.method == WIDE):
            return compute(*inputs)

    def step(self, compute: Callable[..., Tensor], *inputs: Tensor) -> float:
        """One step down the loss that ``compute`` returns."""
        self.optimizer.zero_grad()
        loss = self.forward(compute, *inputs)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


def cosine(steps: int) -> Callable[[int], float]:
    """From 1 to 0."""
    return lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))


def warm_linear(steps: int, warm: int) -> Callable[[int], float]:
    """Up over ``warm`` steps, then down to 0."""
    return lambda step: min(1, (step + 1) / warm) * max(0.0, 1 - step / steps)


def constant(step: int) -> float:
    """1."""
    return 1.0
