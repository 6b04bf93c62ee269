"""An emulation of `simulate` storage in eager PyTorch, written from docs/algorithms.md and sharing no code with the passes.

A model is written a second time as calls of `Emulator.op`, one a model operator. Each call rounds its output; each
use of a value rounds the gradient that comes back through it; a parameter is rounded once and its gradient once.
Inside an operator runs what Inductor would run: the operator's own decomposition, in float32.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from functorch.compile import aot_function, default_partition, nop
from torch._inductor.decomposition import select_decomp_table

from fxprec.config.recipes import Recipe
from fxprec.numerics.formats import Format
from fxprec.numerics.reference import reference_quantize

aten = torch.ops.aten
_DECOMPOSED = select_decomp_table()


class _Round(torch.autograd.Function):
    """Round forward, backward, or both; a None format is the identity. Straight-through."""

    @staticmethod
    def forward(ctx, x, forward: Format | None, backward: Format | None):
        ctx.backward_format = backward
        return x.clone() if forward is None else reference_quantize(x, forward)

    @staticmethod
    def backward(ctx, grad):
        fmt = ctx.backward_format
        return (grad if fmt is None else reference_quantize(grad, fmt)), None, None


class _FromOutput(torch.autograd.Function):
    """An operator whose backward reads its own output: what is kept is the rounded output."""

    @staticmethod
    def forward(ctx, function, backward, fmt: Format, *inputs):
        raw, *rest = function(*inputs)
        rounded = reference_quantize(raw, fmt)
        ctx.save_for_backward(*inputs, rounded, *rest)
        ctx.backward_of = backward
        return rounded

    @staticmethod
    def backward(ctx, grad):
        return None, None, None, *ctx.backward_of(grad, *ctx.saved_tensors)


@dataclass(frozen=True)
class Value:
    """A tensor with the group it is counted in; views share it."""

    tensor: torch.Tensor
    group: int
    is_param: bool = False


class Emulator:
    """Runs one training step, group by group. ``counts[group][kind]`` holds the elements it met."""

    def __init__(self, recipe: Recipe, low: Collection[int]) -> None:
        self.recipe, self.low, self.group = recipe, low, 0
        self.counts: dict[int, Counter[str]] = defaultdict(Counter)
        self._params: dict[int, Value] = {}

    def _format(self, kind: str, group: int) -> Format:
        return self.recipe.format_of(kind, low=group in self.low)

    def _count(self, kind: str, group: int, tensor: torch.Tensor) -> None:
        self.counts[group][kind] += tensor.numel()

    def input(self, x: torch.Tensor) -> Value:
        """A floating-point input of the model, without a gradient."""
        self._count("output", 0, x)
        return Value(reference_quantize(x, self._format("output", 0)), 0)

    def param(self, p: torch.Tensor, first: Value | None) -> Value:
        """A parameter; it lies with the first input of the operator that uses it first."""
        if id(p) not in self._params:
            group = self.group if first is None else first.group
            self._count("param", group, p)
            self._count("grad_param", group, p)
            rounded = _Round.apply(p, self._format("param", group), self._format("grad_param", group))
            self._params[id(p)] = Value(rounded, group, is_param=True)
        return self._params[id(p)]

    def op(self, function: Callable[..., torch.Tensor], *inputs: Value | torch.Tensor, gemm: bool = False) -> Value:
        """Call one operator of the model. Values are rounded tensors, plain tensors go in as they are."""
        if gemm:
            self.group += 1
        args = [self._use(x) if isinstance(x, Value) else x for x in inputs]
        return self._output(_decomposed(function, args))

    def from_output(
        self,
        function: Callable[..., tuple[torch.Tensor, ...]],
        backward: Callable[..., tuple[torch.Tensor, ...]],
        *inputs: Value,
        gemm: bool = False,
    ) -> Value:
        """Call an operator of which ``backward(grad, *inputs, rounded output, *rest)`` gives the gradients.

        ``function`` returns the output, then whatever else its backward needs.
        """
        if gemm:
            self.group += 1
        args = [self._use(x) for x in inputs]
        out = _FromOutput.apply(function, backward, self._format("output", self.group), *args)
        self._count_output(out)
        return Value(out, self.group)

    def relu(self, x: Value) -> Value:
        return self.from_output(lambda x: (x.relu(),), lambda grad, x, out: (torch.where(out <= 0, 0.0, grad),), x)

    def log_softmax(self, x: Value) -> Value:
        """Over the last dimension."""

        def backward(grad: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor]:
            return (grad - out.exp() * grad.sum(-1, keepdim=True),)

        return self.from_output(lambda x: (x.log_softmax(-1),), backward, x)

    def softmax(self, x: Value) -> Value:
        """Over the last dimension."""

        def backward(grad: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor]:
            return (_DECOMPOSED[aten._softmax_backward_data.default](grad, out, -1, torch.float32),)

        return self.from_output(lambda x: (x.softmax(-1),), backward, x)

    def attention(self, q: Value, k: Value, v: Value) -> Value:
        """Causal scaled-dot-product attention as torch runs it on a CPU: one operator."""

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)

        def backward(grad: torch.Tensor, *saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, *saved, 0.0, True)

        return self.from_output(forward, backward, q, k, v, gemm=True)

    def view(self, function: Callable[[torch.Tensor], torch.Tensor], x: Value) -> Value:
        """A view or layout copy: not counted, not rounded."""
        return Value(function(x.tensor), x.group, x.is_param)

    def leave(self, x: Value) -> torch.Tensor:
        """Return the value to the code outside; its gradient is rounded as it comes in."""
        return self._use(x)

    def _use(self, x: Value) -> torch.Tensor:
        if x.is_param or not x.tensor.requires_grad:
            return x.tensor
        return _Round.apply(x.tensor, None, self._format("grad_output", x.group))

    def _output(self, raw: torch.Tensor) -> Value:
        self._count_output(raw)
        return Value(_Round.apply(raw, self._format("output", self.group), None), self.group)

    def _count_output(self, out: torch.Tensor) -> None:
        self._count("output", self.group, out)
        if out.requires_grad:
            self._count("grad_output", self.group, out)


def _decomposed(function: Callable[..., torch.Tensor], args: list[torch.Tensor]) -> torch.Tensor:
    compiled = aot_function(
        function, fw_compiler=nop, bw_compiler=nop, partition_fn=default_partition, decompositions=_DECOMPOSED
    )
    with warnings.catch_warnings():  # it looks for .grad of the graph's inputs, leaves or not
        warnings.simplefilter("ignore", UserWarning)
        return compiled(*args)
