"""Step parameters inside a compiled backward half: find parameter and optimizer, refuse steps that would be wrong."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from fxprec import compat
from fxprec.errors import GradientError
from fxprec.kernels.updates import ApplyUpdate
from fxprec.runtime.optim.all_optimizers import AllOptimizers
from fxprec.runtime.optim.applied import AppliedGradient
from fxprec.runtime.optim.stepper import Stepper
from fxprec.runtime.optim.sums import SummedGradient


class InBackward:
    """The parameters that backward steps, with their optimizers.

    A parameter has two gradients if two forwards read it before backward, or if its ``p.grad`` exists already. Then the
    gradient is added to ``p.grad``, and ``optimizer.step()`` applies the sum. With ``gradients="bf16"`` this is done to
    every gradient, in 16 bits.
    """

    def __init__(self, *optimizers: Stepper) -> None:
        self.optimizers = AllOptimizers(optimizers)
        self._names: dict[Tensor, str] = {}
        self._by_address: dict[int, Parameter] = {}
        self._forwards: Counter[int] = Counter()  # by id of the parameter, since the last step
        self._applied: set[int] = set()  # ids, since the last step
        for optimizer in optimizers:
            optimizer.register_step_post_hook(lambda stepped, *_: self.finish_step(stepped))

    def take(self, parameters: Mapping[str, Parameter]) -> None:
        """Step these parameters, by name, from now on."""
        self._names |= {parameter: name for name, parameter in parameters.items()}
        self._by_address |= {parameter.data_ptr(): parameter for parameter in parameters.values()}

    def saw_forward(self, parameters: Iterable[Parameter]) -> None:
        """Count a forward that reads these parameters and may have a backward."""
        self._forwards.update(map(id, parameters))

    def before_backward(self, parameters: Sequence[Parameter]) -> None:
        """Raise `GradientError`, before anything is changed, if stepping a parameter in backward would be wrong."""
        for optimizer in self.optimizers:
            optimizer.forget_positions()
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if any(optimizer.clips_by_this_step for optimizer in self.optimizers) and any(
            self.optimizers.holder_of(parameter).clips_by_this_step and not self.optimizers.sums_gradients(parameter)
            for parameter in parameters
        ):
            raise GradientError(
                "max_norm with norm='exact' was given to the optimizer after the model was compiled, and backward "
                "steps each parameter before the norm is known; give it norm='last', or max_norm before the first call"
            )
        for parameter in parameters:
            name = self._names[parameter]
            if id(parameter) in self._applied:
                raise GradientError(
                    f"a second backward before optimizer.step(): the first has stepped {name} already, and its "
                    "gradient is not held to add to; call optimizer.step() after each backward, or, to accumulate, "
                    "give the optimizer gradients='bf16', or compile without option optimizer"
                )
            if isinstance(parameter.grad, AppliedGradient):
                raise GradientError(
                    f"backward would add to the gradient of {name}, which is not held: an earlier backward has stepped "
                    "the parameter; call optimizer.zero_grad(set_to_none=True) before backward"
                )
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise GradientError(
                    f"parameter {name} got a hook after the model was compiled with option optimizer, and backward "
                    "makes no p.grad for it; register hooks before the first call"
                )
            if world > 1:
                raise GradientError(
                    f"backward would step {name} before its gradient is exchanged: a process group of {world} ranks "
                    "began after the model was compiled; begin it before, or compile without option optimizer"
                )

    def apply(self, tensor: Tensor, gradient: Tensor) -> None:
        """Step the parameter at the address of ``tensor``, or add to its ``p.grad`` if it has two gradients."""
        parameter = self._at(tensor)
        if not _is_wanted(parameter, self._names[parameter]):
            return
        if self.optimizers.sums_gradients(parameter) and isinstance(parameter.grad, SummedGradient | None):
            self.optimizers.holder_of(parameter).add_gradient(parameter, gradient)
        elif parameter.grad is not None:  # no `AppliedGradient`, which `before_backward` has refused
            parameter.grad.add_(gradient)
        elif self._forwards[id(parameter)] > 1:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        else:
            holder = self.optimizers.holder_of(parameter)
            holder.step_one(parameter, gradient)
            self._applied.add(id(parameter))
            parameter.grad = AppliedGradient(parameter, self._names[parameter], id(holder))

    def _at(self, tensor: Tensor) -> Parameter:
        found = self._by_address.get(tensor.data_ptr())
        if found is None or found.data_ptr() != tensor.data_ptr():  # parameters were moved
            self._by_address = {parameter.data_ptr(): parameter for parameter in self._names}  # type: ignore[misc]
            found = self._by_address[tensor.data_ptr()]
        return found

    def finish_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the forwards and steps of an optimizer's parameters, after its `step`."""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            self._applied.discard(id(parameter))
            self._forwards.pop(id(parameter), None)


def _is_wanted(parameter: Parameter, name: str) -> bool:
    """Return whether this backward accumulates the parameter's gradient. Raises `GradientError` for autograd.grad()."""
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return compat.will_run(node)
    except RuntimeError:
        raise GradientError(
            f"torch.autograd.grad() asks for the gradient of {name}, which backward applies and does not return; call "
            "backward(), or compile without option optimizer"
        ) from None


class _Running(threading.local):
    """The bindings whose backward halves run in this thread, innermost last. Threads may train models of their own."""

    def __init__(self) -> None:
        self.bindings: list[InBackward] = []


_running = _Running()


@contextmanager
def stepping(binding: InBackward) -> Iterator[None]:
    """Within the context, send the updates of the half that runs to ``binding``."""
    _running.bindings.append(binding)
    try:
        yield
    finally:
        _running.bindings.pop()


def apply_update(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Step a parameter by the binding whose backward half runs."""
    _running.bindings[-1].apply(parameter, gradient)
    return gradient.new_empty(0)


ApplyUpdate.implement(apply_update)
