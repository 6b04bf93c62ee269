"""An operator of torch's op_db as a small model: one Linear, an activation, the operator."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

SEED = 0
LOOKED_AT, SAMPLES = 200, 12  # of an operator
LARGEST = 4096  # elements of all operands
FEATURES = 2  # a product with a side of 1 is no GEMM to Inductor
GAIN = 1.3  # what the Linear makes, times this, needs more bits than bfloat16 has
WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def operators() -> list[Any]:
    """Return the operators of op_db that have gradients in float32 on CPU. Raises `ImportError` without expecttest.

    op_db seeds its random operators where it calls them, which Dynamo does not compile. `step` seeds them instead.
    """
    from torch.testing._internal import common_methods_invocations as known

    known.wrapper_set_seed = _unseeded
    return [op for op in known.op_db if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")]


def _unseeded(op: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return op(*args, **named)


class LateError(BaseException):
    """The time of one of a suite is over. No `Exception`: what judges a column's errors does not take it for one."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise `LateError` in the main thread where the block takes longer."""

    def late(*_: object) -> None:
        raise LateError(f"longer than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 numbers rounded to ``dtype``, those beyond its largest to that; other tensors as they are."""
    limit = torch.finfo(dtype).max
    return t.clamp(-limit, limit).to(dtype).float() if t.dtype == torch.float32 else t


class Exercised(nn.Module):
    """The operator on operands that are activations: what one Linear makes of ``values``.

    ``values`` are bfloat16 numbers and the weight is the identity, so that a GEMM in bfloat16 is exact: what is wrong with the
    result is the operator's. The activation is the identity, and no pass makes it again from its input's copy.
    """

    def __init__(self, op: Any, sample: Any) -> None:
        super().__init__()
        self.op = op
        flat, self.spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.flat = [t.detach() if isinstance(t, Tensor) else t for t in flat]
        self.places = [i for i, t in enumerate(flat) if isinstance(t, Tensor) and t.requires_grad]
        self.values = [(self.flat[i] / GAIN).bfloat16().float() for i in self.places]
        self.linear = nn.Linear(FEATURES, FEATURES)
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, *values: Tensor) -> Any:
        return self._run(values, lambda t: t)

    def rounded(self, dtype: torch.dtype) -> Callable[..., Any]:
        """Return the step with operands and results rounded, as they are under autocast."""

        def run(*values: Tensor) -> Any:
            return tree_map_only(Tensor, near, self._run(values, near))

        def near(t: Tensor) -> Tensor:
            return t + (rounded(t, dtype) - t).detach()

        return run

    def applied(self, *operands: Tensor) -> Any:
        """Apply the operator alone."""
        flat = list(self.flat)
        for place, operand in zip(self.places, operands, strict=True):
            flat[place] = operand
        first, rest, named = tree_unflatten(flat, self.spec)
        return self.op(first, *rest, **named)

    def _run(self, values: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> Any:
        operands = []
        for value in values:
            made = self.linear(value.reshape(-1, 1).repeat(1, FEATURES))[:, 0].reshape(value.shape)
            operands.append(change(F.leaky_relu(made * GAIN, 1.0)))
        return self.applied(*operands)

    def smaller(self) -> Exercised:
        """Return the same on operands a little closer to 0: rounding takes a number near 1 out of arcsine's domain."""
        found = Exercised.__new__(Exercised)
        nn.Module.__init__(found)
        found.__dict__ |= {**self.__dict__, "_modules": dict(self._modules)}
        found.values = [(v * 0.97).bfloat16().float() for v in self.values]
        return found

    def widened(self) -> Exercised:
        """Return the same in float64."""
        wide = object.__new__(Exercised)
        nn.Module.__init__(wide)
        wide.op, wide.spec, wide.places = self.op, self.spec, self.places
        wide.flat = [t.to(WIDE.get(t.dtype, t.dtype)) if isinstance(t, Tensor) else t for t in self.flat]
        wide.values = [t.double() for t in self.values]
        wide.linear = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
        wide.linear.load_state_dict(self.linear.state_dict())
        return wide


def samples_of(op: Any) -> Iterator[Exercised]:
    """Yield the operator's first samples whose operands that want a gradient are dense, as models. Seeded.

    Those of no elements are left out. Of more than ``LARGEST`` elements, and beyond the first ``SAMPLES``, one is taken
    where there is no other.
    """
    torch.manual_seed(SEED)
    samples = list(itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=True), LOOKED_AT))
    first = [sample for sample in samples[:SAMPLES] if _is_suitable(sample) and _size(sample) <= LARGEST]
    suitable = (sample for sample in samples if _is_suitable(sample))
    for sample in first or itertools.islice(suitable, 1):
        yield Exercised(op, sample)


def _tensors(sample: Any) -> list[Tensor]:
    return [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, Tensor)]


def _size(sample: Any) -> int:
    return sum(t.numel() for t in _tensors(sample))


def _is_suitable(sample: Any) -> bool:
    wanted = [t for t in _tensors(sample) if t.requires_grad]
    return bool(wanted) and all(t.layout is torch.strided and t.dtype == torch.float32 and t.numel() for t in wanted)


@dataclass
class Numbers:
    """What one step gives, in float64."""

    outputs: list[Tensor]
    operands: list[Tensor]
    """The gradient of each operand."""
    linear: Tensor
    """The gradients of the Linear's weight and bias."""

    def all(self) -> list[Tensor]:
        return [*self.outputs, *self.operands, self.linear]

    @property
    def is_finite(self) -> bool:
        return all(bool(t.isfinite().all()) for t in self.all())


def _real(t: Tensor) -> Tensor:
    t = t.detach()
    t = t.to_dense() if t.layout is not torch.strided else t
    return torch.view_as_real(t.resolve_conj()).double() if t.is_complex() else t.double()


def step(model: Exercised, call: Any = None) -> Numbers:
    """Run forward and backward under a fixed seed, the loss a random projection of all outputs."""
    values = [v.clone().requires_grad_() for v in model.values]
    torch.manual_seed(SEED)
    outputs = [t for t in tree_leaves((model if call is None else call)(*values)) if isinstance(t, Tensor)]
    generator = torch.Generator().manual_seed(SEED + 1)
    roots, incoming = [], []
    for t in outputs:
        gradient = torch.randn(t.shape, dtype=torch.float64, generator=generator)
        if t.requires_grad:
            roots.append(t)
            incoming.append(gradient.to(t.dtype))
    wanted = [*values, model.linear.weight, model.linear.bias]
    nothing: tuple[Tensor | None, ...] = (None,) * len(wanted)
    found = torch.autograd.grad(roots, wanted, incoming, allow_unused=True) if roots else nothing
    full = [
        torch.zeros_like(t, dtype=torch.float64) if g is None else _real(g) for t, g in zip(wanted, found, strict=True)
    ]
    linear = torch.cat([g.flatten() for g in full[-2:]])
    return Numbers([_real(t) for t in outputs if t.numel()], full[:-2], linear)


def errors(found: Numbers, exact: Numbers, values: list[Tensor]) -> tuple[float, float]:
    """Return the largest relative error (Euclidean norm) of an output, and of a gradient.

    A gradient that is small beside the others is measured by a thousandth of all. The Linear's is a sum over all
    elements, which cancels where the operator's is orthogonal to its operand, as a norm's: it is measured by the product
    of the norms of its factors, which it cannot exceed.
    """
    all_ = max(_norm(exact.operands), 1e-30)
    outputs = [_off(f, e, 0.0) for f, e in zip(found.outputs, exact.outputs, strict=True)]
    gradients = [_off(f, e, all_ / 1000) for f, e in zip(found.operands, exact.operands, strict=True)]
    elements = sum(v.numel() for v in values)
    for part, factor in ((slice(None, -FEATURES), _norm(values)), (slice(-FEATURES, None), elements**0.5)):
        gradients.append(_off(found.linear[part], exact.linear[part], factor * all_))
    return max(outputs, default=0.0), max(gradients)


def _norm(tensors: list[Tensor]) -> float:
    return float(sum(t.double().square().sum() for t in tensors)) ** 0.5


def _off(found: Tensor, exact: Tensor, at_least: float) -> float:
    if found.shape != exact.shape:
        return float("inf")
    same = (found == exact) | (found.isnan() & exact.isnan())
    difference = torch.where(same, 0.0, found - exact)
    error = float(difference.norm()) / max(float(exact.nan_to_num(0, 0, 0).norm()), at_least, 1e-12)
    return error if error == error else float("inf")
