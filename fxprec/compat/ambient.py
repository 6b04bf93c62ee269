"""The context that determines the result of tracing a graph: a thread's state, and the fake mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import sympy
import torch
import torch._guards
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily


@dataclass(frozen=True)
class Ambient:
    """The thread state that determines the result of tracing; Dynamo guards it, and recompiling restores it."""

    grad: bool
    inference: bool
    dtype: torch.dtype
    autocast: tuple[tuple[str, torch.dtype, bool], ...]  # device type, autocast dtype, whether enabled

    @classmethod
    def now(cls, device: torch.device) -> Ambient:
        """Return the state of the current thread."""
        devices = dict.fromkeys(("cpu", device.type))
        autocast = tuple((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices)
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), autocast)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Set this state inside the context. The state before is restored even if a compilation fails."""
        before = torch.get_default_dtype()
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(self.dtype)
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled))
            yield


def current_fake_mode() -> FakeTensorMode | None:
    """Return the fake mode of the current compilation, or None outside of one."""
    context = torch._guards.TracingContext.try_get()
    return None if context is None else context.fake_mode


def fake_mode_of(value: object) -> FakeTensorMode | None:
    """Return the mode of a fake tensor, or None for any other value."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


def real_tensors() -> contextlib.AbstractContextManager[object]:
    """Compute with real tensors inside the context, while a graph is traced with fake tensors."""
    return unset_fake_temporarily()


def size_guards(fake_mode: FakeTensorMode | None) -> tuple[sympy.Basic, ...]:
    """Return the conditions on dynamic sizes that were assumed under a fake mode so far, oldest first."""
    shapes = None if fake_mode is None else fake_mode.shape_env
    return () if shapes is None else tuple(guard.expr for guard in shapes.guards)


def symbol_of(value: object) -> sympy.Symbol | None:
    """Return the symbol that a graph's input stands for, as it was captured; None for other values."""
    found = value.node._expr if isinstance(value, torch.SymInt) else None
    return found if isinstance(found, sympy.Symbol) else None


@contextlib.contextmanager
def tracing_with(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Compile outside of Dynamo with the fake mode, and so with the symbolic shapes, of an earlier compilation."""
    with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        yield
