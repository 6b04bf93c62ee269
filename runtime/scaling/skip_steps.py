"""Skip optimizer steps for the baseline ``grad_scaling="dynamic"`` without a change to the training loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fxprec.runtime.controller import Controller
from fxprec.runtime.optim.clipping import norms_of
from fxprec.runtime.scaling.loss_scaling import LossScaleKeeper

OPTION = 'grad_scaling="dynamic"'
_SHARDS = (
    "a gradient overflowed, and the optimizer's step is not skipped: it steps shards (FSDP2), and which model they "
    "belong to is unknown; take grad_scaling='auto', whose scales need no skipped steps, or DDP"
)
_UNTRACED = f"{OPTION} reads what the gradients are before it lets an optimizer step"


class StepSkipper:
    """A hook that skips optimizer steps for the baseline ``grad_scaling="dynamic"``, as long as its backend lives.

    A dynamic loss scale grows until gradients overflow; then the step is skipped (Micikevicius et al. 2018). The hook
    runs before every optimizer's step. It sets the gradients of the graphs' parameters to None, and an optimizer passes
    over parameters without a gradient. ``tell(what, detail)`` warns once.
    """

    def __init__(self, controllers: Callable[[], Sequence[Controller]], tell: Callable[[str, str], None]) -> None:
        self.skipped = 0  # optimizer steps
        self._controllers, self._tell = controllers, tell
        self._parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
        me = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            if (skipper := me()) is not None:
                skipper._before_step(optimizer)

        handle = register_optimizer_step_pre_hook(torch.compiler.disable(before_step, reason=_UNTRACED))
        weakref.finalize(self, handle.remove)

    def saw(self, args: Sequence[object]) -> None:
        """Remember the parameters that a graph was called with."""
        self._parameters.update((a, None) for a in args if isinstance(a, torch.nn.Parameter))

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        own = [p for p in stepped if p in self._parameters]
        if own and self._is_spoilt(own):
            self.skipped += 1
            for p in own:
                p.grad = None
        elif not own and any(isinstance(p, DTensor) for p in stepped) and self._overflowed():
            self._tell(OPTION, _SHARDS)

    def _is_spoilt(self, own: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether the step must be skipped, on all ranks alike; waits for the device.

        What overflowed on one rank is unknown to the others, but the gradients that ranks exchange have its inf or NaN.
        """
        overflowed = self._overflowed()
        for keeper in self._keepers():
            keeper.stepped = True
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return overflowed
        norms = norms_of([p.grad for p in own if p.grad is not None])
        return not all(bool(norm.isfinite()) for norm in norms)

    def _overflowed(self) -> bool:
        """Return whether any gradient overflowed since the last step; waits for the device."""
        for controller in self._controllers():
            controller.act_on_all()
        return any(keeper.spoilt for keeper in self._keepers())

    def _keepers(self) -> list[LossScaleKeeper]:
        keepers = (controller.keeper for controller in self._controllers())
        return [keeper for keeper in keepers if isinstance(keeper, LossScaleKeeper)]
