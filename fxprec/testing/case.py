"""Run a model, its inputs and its loss for one step in several precisions."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fxprec.compat import keystr, tree_flatten_with_path, tree_leaves, tree_map_only, untraced
from fxprec.config import Config
from fxprec.config.processor import PORTABLE
from fxprec.driver.backend import Backend
from fxprec.errors import ConfigError, FxprecError, ReferenceRunError, first_line
from fxprec.report.safetensors import bytes_of

Loss = Callable[[Any], Tensor]
Tensors = Mapping[str, Tensor]
"""Tensors of one step, float64 on the CPU, by name: ``output``, ``loss``, each ``PARAMETER.grad``, and
``input[i].grad`` of inputs that require a gradient."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The first step's statistics choose the scales; the second step's arrive in the third.
STEPS = 3


@dataclass(frozen=True)
class Case:
    """A model as its factory made it. Runs use copies, so that each run begins with the same weights."""

    model: nn.Module
    inputs: tuple[Any, ...]
    loss: Loss | None = None
    seed: int = 0

    @classmethod
    def make(
        cls, factory: Callable[[], Any], inputs: object = None, *, loss: Loss | None = None, seed: int = 0
    ) -> Case:
        """Call ``factory`` under ``seed``. It returns a module, or ``(module, inputs)`` where ``inputs`` is None.

        ``inputs`` is a tensor, a tuple of arguments, or a function of no arguments that returns either. Raises
        `ConfigError`.
        """
        if not callable(factory):
            raise ConfigError(f"factory is {type(factory).__name__}; give a function that returns the model")
        torch.manual_seed(seed)
        made = factory()
        if inputs is None and isinstance(made, tuple | list) and len(made) == 2:
            made, inputs = made
        inputs = inputs() if callable(inputs) else inputs
        if not isinstance(made, nn.Module):
            raise ConfigError(f"the factory returned {type(made).__name__}; let it return a torch.nn.Module")
        if inputs is None:
            raise ConfigError("inputs is None; give the model's inputs, or let the factory return (model, inputs)")
        return cls(made, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), loss, seed)

    def reference(self) -> Tensors:
        """Run in float64, uncompiled. Raises `ReferenceRunError` if the model cannot."""
        before = torch.get_rng_state()
        found = self._converted(torch.float64, "make its constants follow the inputs' dtype (x.new_tensor, .to(x))")
        if not torch.equal(before, torch.get_rng_state()):
            raise ReferenceRunError(
                f"{self.name} draws random numbers in forward (dropout?), so two runs differ; set their probability "
                "to 0 or call .eval() in the factory"
            )
        return found

    def yardstick(self, reference: str) -> Tensors:
        """Run in the reference precision ("bf16", "fp16" or "fp32"), uncompiled."""
        others = ", ".join(repr(name) for name in DTYPES if name != reference)
        return self._converted(DTYPES[reference], f"choose another reference: {others}")

    @property
    def name(self) -> str:
        """Return the class name of the model."""
        return type(self.model).__name__

    @property
    def inputs_hash(self) -> str:
        """Return a hash of the inputs: dtypes, shapes and values of tensors, and numbers and texts."""
        found = hashlib.sha256()
        for leaf in tree_leaves(self.inputs):
            if isinstance(leaf, Tensor):
                found.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode() + bytes_of(leaf.detach()))
            else:
                found.update(repr(leaf if isinstance(leaf, int | float | str) else type(leaf)).encode())
        return found.hexdigest()[:32]

    def _converted(self, dtype: torch.dtype, way_out: str) -> Tensors:
        """Run a copy of the model and its inputs converted to ``dtype``."""
        name = str(dtype).removeprefix("torch.")
        model = copy.deepcopy(self.model).to(dtype)
        inputs = _own(self.inputs, dtype)
        try:
            outputs = model(*inputs)
            found = _step(model, inputs, outputs, self.loss)
        except FxprecError:
            raise
        except Exception as error:
            self.run_as_it_is()  # a model that runs in no precision raises its own error
            raise ReferenceRunError(f"{self.name} cannot run in {name}: {first_line(error)}; {way_out}") from None
        got = next((o.dtype for o in tree_leaves(outputs) if _is_float(o) and o.dtype != dtype), None)
        if got is not None and dtype == torch.float64:
            raise ReferenceRunError(f"{self.name} cannot run in {name}: its output is {got}; {way_out}")
        return found

    def run_as_it_is(self) -> None:
        """Run a step uncompiled, in the model's own precision. Raises what the model raises."""
        model, inputs = self.fresh(), _own(self.inputs)
        _step(model, inputs, model(*inputs), self.loss)

    def fresh(self) -> nn.Module:
        """Return a copy of the model as it was made."""
        return copy.deepcopy(self.model)


class Compiled:
    """A case compiled by fxprec. ``torch.compile`` is reset first, so that earlier models have no influence."""

    def __init__(self, case: Case, config: Config) -> None:
        self.case, self.model = case, case.fresh()
        self.backend = Backend(replace(config, cpu=config.cpu or PORTABLE) if config.lowering == "eager" else config)
        self.inputs = _own(case.inputs)
        torch.compiler.reset()
        with quiet():
            self._call = torch.compile(self.model, backend=self.backend)

    def __call__(self, *args: object) -> Any:
        """Run the model, compiled or not."""
        return self._call(*args)

    def run(self, steps: int) -> Tensors:
        """Run ``steps`` steps on the same inputs; return the last step's tensors."""
        for _ in range(steps):
            self.model.zero_grad(set_to_none=True)
            torch.manual_seed(self.case.seed)
            inputs = _own(self.inputs)
            with quiet():
                found = _step(self.model, inputs, self._call(*inputs), self.case.loss)
        return found

    @contextmanager
    def jittered(self, scale: float, seed: int) -> Iterator[None]:
        """Multiply parameters and inputs by ``1 + scale * normal`` inside the block, except values exact in bfloat16.

        Exact values may lie on a tie between two numbers of a format; another machine would not break the tie either.
        """
        generator = torch.Generator().manual_seed(seed)
        targets = [p for p in (*self.model.parameters(), *tree_leaves(self.inputs)) if _is_float(p)]
        before = [t.detach().clone() for t in targets]
        for target in targets:
            noise = torch.randn(target.shape, generator=generator, dtype=torch.float32, device="cpu").to(target)
            exact = target.detach().bfloat16().to(target.dtype) == target.detach()
            target.data.mul_(torch.where(exact, 1.0, 1.0 + scale * noise))
        try:
            yield
        finally:
            for target, value in zip(targets, before, strict=True):
                target.data.copy_(value)


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore torch's warnings about its own deprecated uses, and no others; do not trace every graph.

    pytest records what every logger writes, and torch would serialise its graphs for the log.
    """
    with untraced(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        yield


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _own(inputs: object, dtype: torch.dtype | None = None) -> Any:
    """Copy the inputs, floating-point ones to ``dtype``."""

    def convert(t: Tensor) -> Tensor:
        to = dtype if dtype is not None and t.is_floating_point() else t.dtype
        return t.detach().to(to, copy=True).requires_grad_(t.requires_grad)

    return tree_map_only(Tensor, convert, inputs)


def _step(model: nn.Module, inputs: tuple[Any, ...], outputs: object, loss: Loss | None) -> Tensors:
    """Take the loss of ``outputs``, run backward, and return outputs, loss and gradients by name."""
    found = {}
    for path, leaf in tree_flatten_with_path(outputs)[0]:
        if _is_float(leaf):
            found[f"output{keystr(path)}"] = leaf
    wide = tree_map_only(Tensor, _at_least_float32, outputs)
    value = squared_distance(tree_leaves(wide)) if loss is None else loss(wide)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"loss returned {shown}; let it return a tensor of one element")
    found["loss"] = value
    if value.requires_grad:
        value.backward()
    found |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    for path, leaf in tree_flatten_with_path(inputs)[0]:
        if _is_float(leaf) and leaf.grad is not None:
            found[f"input{keystr(path)}.grad"] = leaf.grad
    return {name: t.detach().to("cpu", torch.float64).clone() for name, t in found.items()}


def _at_least_float32(t: Tensor) -> Tensor:
    return t.float() if t.is_floating_point() and t.itemsize < 4 else t


def squared_distance(outputs: Sequence[Any]) -> Tensor:
    """Return half the mean squared distance of every floating-point output to fixed normal targets; a scalar as it is.

    So every element has its own gradient, and the loss is not a small difference of large numbers. Raises `ConfigError`
    if no output is floating-point.
    """
    outputs = [o for o in outputs if _is_float(o)]
    if not outputs:
        raise ConfigError("the model returned no floating-point tensor; give a loss")
    if len(outputs) == 1 and outputs[0].ndim == 0:
        result: Tensor = outputs[0]
        return result
    generator = torch.Generator().manual_seed(0)
    targets = [torch.randn(o.shape, generator=generator, dtype=torch.float32, device="cpu").to(o) for o in outputs]
    parts = [(o - target).square().mean() / 2 for o, target in zip(outputs, targets, strict=True)]
    return torch.stack([p.to(parts[0]) for p in parts]).sum()
