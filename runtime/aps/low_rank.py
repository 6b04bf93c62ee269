"""Send a matrix as the product of two narrow ones, with error feedback: PowerSGD (Vogels, Karimireddy, Jaggi 2019).

A rank's matrix M (n, m) is its gradient plus its residual. The Q (m, r) of the last step is made orthonormal. Ranks add
up M Q to P (n, r), and make P orthonormal. They average M^T P, which is the next Q. The mean gradient is P Q^T, and
M - P Q^T is the rank's next residual. Definitions: docs/algorithms.md, "Bits by link".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fxprec.runtime.aps.exchange import sum_over_ranks

if TYPE_CHECKING:
    from fxprec.runtime.aps.bucket import Part

LEAST_GAIN = 2
"""A matrix goes in low rank if that sends less than half of its numbers; torch's hook has the same default."""
PASSES = 3
"""Passes over one gradient, starting from a random Q, after which its error is measured."""
SKETCH = 1024
"""Number of sums from which an error's squared norm is estimated, with a standard deviation of 4 %."""


def columns_of(parameter: Tensor, rank: int) -> int:
    """Return the columns of the matrix that a layer is sent as in low rank, or 0 if the layer goes whole.

    The first dimension of a layer of more than two dimensions has the rows of the matrix, as in PowerSGD.
    """
    if parameter.dim() < 2 or not rank or not parameter.numel():
        return 0
    rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
    gains = LEAST_GAIN * rank * (rows + columns) < rows * columns
    return columns if gains else 0


@lru_cache(maxsize=64)
def first_factor(seed: int, columns: int, rank: int, device: torch.device) -> Tensor:
    """Return the random Q (columns, rank) with which matrices begin, equal on all ranks."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(columns, rank, generator=generator, dtype=torch.float32, device="cpu").to(device)


class Memory:
    """State of layers that a rank keeps from step to step. `seed` decides the Q with which layers begin."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.residuals = WeakTensorKeyDictionary()
        """Residual of each parameter's gradients (elements,): what was not sent yet."""
        self.factors = WeakTensorKeyDictionary()
        """Q (m, r) of the last step in which a parameter went in low rank, equal on all ranks."""

    def first(self, columns: int, rank: int, device: torch.device) -> Tensor:
        """Return the Q (columns, rank) with which a layer begins."""
        return first_factor(self._seed, columns, rank, device)

    def start(self, parameter: Tensor, columns: int, rank: int) -> Tensor:
        """Return the Q (columns, rank) of the last step, or else the one with which a layer begins."""
        found: Tensor | None = self.factors.get(parameter)
        return self.first(columns, rank, parameter.device) if found is None or found.shape[1] != rank else found

    def keep_factors(self, parameters: Iterable[Tensor]) -> None:
        """Keep the Q of these parameters only."""
        kept = WeakTensorKeyDictionary()
        for parameter in parameters:
            if parameter in self.factors:
                kept[parameter] = self.factors[parameter]
        self.factors = kept

    def owe(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Add a gradient (n, m) to its layer's residual; return M, a view of the residual's memory."""
        found: Tensor | None = self.residuals.get(parameter)
        if found is None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            found = gradient.to(wide, copy=True, memory_format=torch.contiguous_format).flatten()
            self.residuals[parameter] = found
            return found.view_as(gradient)
        return found.view_as(gradient).add_(gradient)


class Late:
    """Parts of a step's buckets that wait for the last bucket; together they take two collectives of few bytes."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.done: Future[None] = Future()
        """Ends with the exchange of the parts."""

    def end(self, exchanged: Future[None]) -> None:
        """End `done` with the exchange's result or error."""
        if (error := exchanged.exception()) is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


class Factors:
    """Matrices of float32 or wider that are factored to P Q^T; `starts` are their Q of the step before."""

    def __init__(self, matrices: Sequence[Tensor], starts: Sequence[Tensor]) -> None:
        self.matrices = matrices
        self._starts = [_orthonormal(q.to(m)) for q, m in zip(starts, matrices, strict=True)]
        self._finite: list[Tensor] = []
        self._rows: list[Tensor] = []

    def rows(self) -> list[Tensor]:
        """Return M Q (n, r) of each matrix, to be added over ranks."""
        return [m @ q for m, q in zip(self.matrices, self._starts, strict=True)]

    def columns(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Return M^T P (m, r) of each matrix, to be averaged over ranks, from the sums of `rows`."""
        self._finite = [p.isfinite().all() for p in sums]
        self._rows = [_orthonormal(p.to(m).nan_to_num()) for p, m in zip(sums, self.matrices, strict=True)]
        # Here MKL reads m by rows, which takes a fifth of the time of m.T @ p
        return [(p.T @ m).T for p, m in zip(self._rows, self.matrices, strict=True)]

    def pairs(self, means: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return P (n, r) and Q (m, r) of each matrix, from the means of `columns`, and whether they are finite ().

        P is orthonormal, so no element of P Q^T exceeds the norm of Q. If a rank's matrix is not finite, Q is NaN.
        """
        found = []
        for p, q, finite in zip(self._rows, means, self._finite, strict=True):
            most = torch.finfo(p.dtype).max
            is_finite = finite & (torch.linalg.vector_norm(q, dtype=torch.float64) <= most)
            found.append((p, torch.where(is_finite, q.to(p), torch.nan), is_finite))
        return found


def _orthonormal(columns: Tensor) -> Tensor:
    found: Tensor = torch.linalg.qr(columns).Q
    return found


def usable(factor: Tensor, first: Tensor) -> Tensor:
    """Return the Q to continue with: `first` if it is not finite, and in columns of zeros, which would stay zero."""
    return torch.where(factor.isfinite().all() & (factor != 0).any(0), factor, first.to(factor))


def joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return all tensors flat and joined."""
    return torch.cat([x.reshape(-1).to(dtype) for x in tensors])


def parted(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the tensors of these shapes that lie one after another in `flat`."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def errors_of(
    layers: Sequence[tuple[Tensor, Tensor]], rank: int, memory: Memory, group: dist.ProcessGroup, *, in_force: bool
) -> tuple[Tensor, int]:
    """Return the squared error (float64, one per layer) of P Q^T against the mean gradient, and a sum of bits.

    The sum of the bits of P Q^T is equal on ranks whose products are equal. `layers` are parameters with this rank's
    gradients. Layers that now go in low rank (`in_force`) take one pass with their residuals. Others take `PASSES`
    passes from no residual, so that Q adapts to the gradient. No rank has the mean gradient, so the squared norm is
    estimated from a random sketch of each rank's error, which ranks can average.
    """
    size = dist.get_world_size(group)
    gradients = [g.reshape(p.shape[0], -1).float() for p, g in layers]
    owed = [memory.residuals.get(p) if in_force else None for p, _ in layers]
    matrices = [g if r is None else g + r.view_as(g) for g, r in zip(gradients, owed, strict=True)]
    factors = [memory.start(p, g.shape[1], rank) for (p, _), g in zip(layers, gradients, strict=True)]
    products = gradients
    for last in range(1 if in_force else PASSES):
        if last:
            matrices = [g + m - x for g, m, x in zip(gradients, matrices, products, strict=True)]
        step = Factors(matrices, factors)
        sums = _reduced(step.rows(), group)
        factors = [q / size for q in _reduced(step.columns(sums), group)]
        products = [p @ q.T for p, q, _ in step.pairs(factors)]
    sketches = torch.stack([_sketch(x - g) for x, g in zip(products, gradients, strict=True)])
    dist.all_reduce(sketches, group=group)
    bits = sum(int(x.view(torch.int32).sum(dtype=torch.int64)) for x in products)
    return (sketches / size).square().sum(1), bits


def _reduced(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    flat = joined(tensors, tensors[0].dtype)
    return parted(sum_over_ranks(flat, group), [x.shape for x in tensors])


def _sketch(x: Tensor) -> Tensor:
    """Return sums of elements with random signs, float64 (`SKETCH`,): linear in x, with x's squared norm on average."""
    generator = torch.Generator("cpu").manual_seed(x.numel())
    place = torch.randint(2 * SKETCH, (x.numel(),), generator=generator, device="cpu").to(x.device)
    sums = x.new_zeros(2 * SKETCH, dtype=torch.float64).index_add_(0, place, x.reshape(-1).double())
    return sums[:SKETCH] - sums[SKETCH:]
