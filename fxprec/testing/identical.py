"""Compare two values bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxprec.compat import keystr, tree_flatten_with_path
from fxprec.errors import NumericsError
from fxprec.plan import Plan
from fxprec.plan.lines import aligned
from fxprec.testing.finding import SHOWN

_INTS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def assert_identical(before: object, after: object) -> None:
    """Raise `NumericsError` unless both are the same bit for bit: dtypes, shapes, signs of zeros, NaN codes.

    Takes tensors, modules (parameters, buffers and gradients), plans, plain values and nests of these, or functions
    without arguments that return such values. The error names each tensor that differs, with the number of elements
    that differ and the first of them.
    """
    ours, theirs = _leaves(before), _leaves(after)
    lines = [("tensor", "what")]
    for name in {**ours, **theirs}:
        if name not in ours or name not in theirs:
            lines.append((name or "value", f"only in the {'first' if name in ours else 'second'}"))
        elif (text := _difference(ours[name], theirs[name])) is not None:
            lines.append((name or "value", text))
    if len(lines) > 1:
        more = len(lines) - 1 - SHOWN
        text = aligned(lines[: SHOWN + 1])
        raise NumericsError(text + (f"\n... and {more} more" if more > 0 else ""))


def _leaves(value: object) -> dict[str, object]:
    if callable(value) and not isinstance(value, nn.Module):
        value = value()
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(_expanded(value))[0]}


def _expanded(value: object) -> object:
    if isinstance(value, nn.Module):
        grads = {f"{n}.grad": p.grad for n, p in value.named_parameters() if p.grad is not None}
        return {**value.state_dict(), **grads}
    if isinstance(value, Plan):
        return value.to_dict()
    if isinstance(value, list | tuple):
        return type(value)(_expanded(v) for v in value) if type(value) in (list, tuple) else value
    return {k: _expanded(v) for k, v in value.items()} if isinstance(value, dict) else value


def _difference(a: object, b: object) -> str | None:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return None if type(a) is type(b) and a == b else f"{a!r:.60} is not {b!r:.60}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {tuple(a.shape)} is not {b.dtype} {tuple(b.shape)}"
    differ = _bits(a) != _bits(b)
    count = int(differ.sum())
    if not count:
        return None
    first = int(differ.reshape(a.numel(), -1).any(1).nonzero()[0])
    x, y = (t.detach().cpu().reshape(-1)[first].item() for t in (a, b))
    return f"{count} of {a.numel()} elements differ; the first, number {first}, is {x!r} and not {y!r}"


def _bits(t: Tensor) -> Tensor:
    """Return the elements' bits as integers, a complex number's as two."""
    t = t.detach().cpu().contiguous()
    t = torch.view_as_real(t) if t.is_complex() else t
    return t.view(_INTS[t.itemsize]) if t.ndim else t.reshape(1).view(_INTS[t.itemsize])
