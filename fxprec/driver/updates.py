"""Choose the parameters of a captured graph that the backward half may step, for option ``optimizer``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from fxprec import compat
from fxprec.config import Settings
from fxprec.config.grad_scaling import LossScaling
from fxprec.driver.backward import before_backward
from fxprec.driver.event_log import EventLog
from fxprec.driver.wrappers import Run
from fxprec.errors import ConfigError
from fxprec.passes.analysis.inputs import GraphInput
from fxprec.runtime.optim.all_optimizers import AllOptimizers
from fxprec.runtime.optim.in_backward import InBackward, stepping
from fxprec.runtime.optim.stepper import Stepper


def steppers_of(optimizer: object) -> Sequence[Stepper]:
    """Return the given optimizer, or those of a list. Raises `ConfigError` for another class or an empty list."""
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    found = [one for one in given if isinstance(one, Stepper)]
    if not found or len(found) < len(given):
        other = next((one for one in given if one not in found), optimizer)
        name = type(other).__name__
        way = f"fxprec.optim.{name}" if name in _OURS else "an AdamW, Lion, Muon or SGD of fxprec.optim, a list of them"
        why = "and backward can only run steps of fxprec.optim"
        raise ConfigError(f"optimizer is {_named(other)}, {why}; give it {way}, or leave it out")
    return found


def _named(optimizer: object) -> str:
    """Return a class's name, with its module: torch's classes and ours have the same names."""
    kind = type(optimizer)
    module = kind.__module__
    name = "torch.optim" if module.startswith("torch.optim.") else module
    return kind.__name__ if module == "builtins" else f"{name}.{kind.__name__}"


_OURS = ("AdamW", "Lion", "Muon", "SGD")
"""Classes of `fxprec.optim`, which other libraries have under the same names."""


@dataclass(frozen=True)
class Updates:
    """The parameters of one graph that backward steps, by position among the graph's inputs."""

    binding: InBackward
    stepped: dict[int, Parameter]

    @classmethod
    def of(
        cls,
        binding: InBackward,
        inputs: Sequence[GraphInput],
        args: Sequence[Any],
        settings: Settings,
        log: EventLog,
        *,
        plans_only: bool = False,
    ) -> Updates:
        """Choose the parameters that backward may step; warn of the others, one line per reason.

        With ``plans_only`` nothing runs, and parameters may be fake.
        """
        known = [(i, known.name, args[i]) for i, known in enumerate(inputs) if known.kind == "param"]
        others = {_memory(arg) for item, arg in zip(inputs, args, strict=False) if item.kind != "param"} - {None}
        held: dict[str, list[str]] = {}
        stepped, why_none = dict[int, Parameter](), _why_none(settings, args)
        places = [_place(arg) for _, _, arg in known if type(arg) is Parameter or _is_fake(arg)]
        for i, name, arg in known:
            if not isinstance(arg, torch.Tensor) or not arg.requires_grad:
                continue
            why = why_none or ("it is not a plain parameter" if _is_fake(arg) and not plans_only else None)
            why = why or next(_why_held(arg, binding.optimizers, places, others), None)
            if why is None:
                stepped[i] = arg  # type: ignore[assignment]
            else:
                held.setdefault(why, []).append(name)
        optimizers = binding.optimizers
        unclipped = {
            i: p
            for i, p in stepped.items()
            if not optimizers.holder_of(p).clips_by_this_step or optimizers.sums_gradients(p)
        }
        if len(unclipped) < len(stepped):
            log.note("memory", "optimizer", _HELD_TO_CLIP)
            stepped = unclipped
        for why, names in held.items():
            log.tell(f"optimizer: {', '.join(names)}", f"{_IS_HELD}: {why}")
        if not plans_only:
            binding.take({inputs[i].name: parameter for i, parameter in stepped.items()})
        return cls(binding, stepped)

    @property
    def workspaces(self) -> dict[int, int]:
        """Bytes of temporary memory that the step of each parameter needs, by position among the graph's inputs."""
        optimizers = self.binding.optimizers
        return {
            at: 0 if optimizers.sums_gradients(parameter) else optimizers.holder_of(parameter).workspace_of(parameter)
            for at, parameter in self.stepped.items()
        }

    def saw_forward(self, results: Any) -> None:
        """Count a forward, and add hooks that check the parameters before its backward runs."""
        parameters = list(self.stepped.values())
        self.binding.saw_forward(parameters)
        before_backward(results, lambda: self.binding.before_backward(parameters))

    def around(self, run: Run) -> Run:
        """Wrap the backward half ``run``, so that its updates go to the optimizer."""

        def call(args: list[Any]) -> Any:
            with stepping(self.binding):
                return run(args)

        return compat.boxed(call)


_IS_HELD = "backward computes p.grad in the parameter's dtype, and optimizer.step() applies it"
_HELD_TO_CLIP = (
    "gradients are held until optimizer.step(): max_norm with norm='exact' clips by the norm of all of them; with "
    "norm='last' backward clips by the last step's and holds none"
)


def _why_none(settings: Settings, args: Sequence[Any]) -> str | None:
    """Return why no parameter may be stepped in backward, or None."""
    asked, scaling = settings.asked, settings.grad_scaling
    if isinstance(scaling, LossScaling) and scaling.dynamic:
        return "grad_scaling='dynamic' may skip the step once all gradients are there"
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return "gradients are exchanged between ranks after backward has made them"
    if asked.verify or asked.dump_tensors:
        return "verify and dump_tensors run parts of backward a second time"
    if asked.mode in ("reduce-overhead", "max-autotune") and any(getattr(arg, "is_cuda", False) for arg in args):
        return f"mode={asked.mode!r} records backward as a CUDA graph, which would replay one step's learning rate"
    return None


def _is_fake(arg: torch.Tensor) -> bool:
    return isinstance(arg, compat.FakeTensor)


def _place(arg: torch.Tensor) -> tuple[int, int]:
    """Return the address of a parameter's memory, or storage and offset of a fake parameter."""
    return (arg.untyped_storage()._cdata, int(arg.storage_offset())) if _is_fake(arg) else (arg.data_ptr(), 0)


def _memory(arg: object) -> int | None:
    """Return what identifies the memory of a strided tensor; None for other arguments."""
    is_strided = isinstance(arg, torch.Tensor) and arg.layout is torch.strided
    return arg.untyped_storage()._cdata if is_strided else None  # type: ignore[attr-defined]


def _why_held(
    arg: torch.Tensor,
    optimizers: AllOptimizers,
    places: Sequence[tuple[int, int]],
    others: Collection[int | None],
) -> Iterator[str]:
    """Yield the reasons why one parameter may not be stepped in backward."""
    if not isinstance(arg, Parameter) or isinstance(arg, DTensor) or not arg.is_leaf:
        yield "it is not a plain parameter"
        return
    groups = [group for group in optimizers.param_groups if any(arg is p for p in group["params"])]
    if not groups:
        yield "the optimizer does not hold it"
    elif len(groups) > 1:
        yield "two optimizers hold it, and each applies its gradient"
    elif groups[0]["error_if_nonfinite"] and groups[0]["gradients"] is None:
        yield "error_if_nonfinite looks at all gradients before the first step"
    if arg._backward_hooks or arg._post_accumulate_grad_hooks:
        yield "it has hooks, which need its gradient"
    if not arg.numel() or places.count(_place(arg)) > 1:
        yield "it shares its memory with another parameter, or is empty"
    if _memory(arg) in others:
        yield "a buffer or an input shares its memory, and backward may read that after the step"
