"""Send a matrix as the product of two narrow ones, with error feedback: PowerSGD (Vogels, Karimireddy, Jaggi 2019).

A rank's matrix M (n, m) is its gradient plus its residual. The Q (m, r) of the last step is made orthonormal. Ranks add
M Q to P (n, r), and make P orthonormal. They average M^T P, which is the next Q. The mean is P Q^T, and what it misses
of M is the rank's next residual. Definitions: docs/algorithms.md, "Bits by link".
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from fxprec.runtime.aps.bucket import Part
    from fxprec.runtime.aps.state import APSState

LEAST_GAIN = 2
"""A matrix goes in low rank where that sends less than a half of its numbers; torch's hook has the same default."""
PASSES = 3
"""Steps of a gradient that stands still after which its error is measured, from a Q that knows nothing of it."""
SKETCH = 1024
"""Sums that an error's squared norm is estimated from: a standard deviation of 4 %."""


def columns_of(parameter: Tensor, rank: int) -> int:
    """Return the columns of the matrix that a layer is sent as in low rank, 0 where it is not.

    A layer of more than two dimensions is a matrix of its first one, as in PowerSGD.
    """
    if parameter.dim() < 2 or not rank or not parameter.numel():
        return 0
    rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
    gains = LEAST_GAIN * rank * (rows + columns) < rows * columns
    return columns if gains else 0


class Memory:
    """What a rank keeps of layers from step to step. `seed` is that of the random Q which layers begin with."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.residuals = WeakTensorKeyDictionary()
        """What is still owed of each parameter's gradients (elements,)."""
        self.factors = WeakTensorKeyDictionary()
        """Q (m, r) of the last step that a parameter went in low rank, equal on all ranks."""

    def first(self, parameter: Tensor, rank: int) -> Tensor:
        """Return the Q (m, rank) that a parameter begins with, equal on all ranks."""
        generator = torch.Generator("cpu").manual_seed(self._seed)
        columns = parameter.numel() // parameter.shape[0]
        found = torch.randn(columns, rank, generator=generator, dtype=torch.float32, device="cpu")
        return found.to(parameter.device)

    def start(self, parameter: Tensor, rank: int) -> Tensor:
        """Return the Q (m, rank) of the last step, or that which a parameter begins with."""
        found: Tensor | None = self.factors.get(parameter)
        return self.first(parameter, rank) if found is None or found.shape[1] != rank else found


class Factors:
    """Matrices on their way to P Q^T; `starts` are their Q of the step before."""

    def __init__(self, matrices: Sequence[Tensor], starts: Sequence[Tensor]) -> None:
        wide = [torch.promote_types(m.dtype, torch.float32) for m in matrices]
        self.matrices = [m.to(dtype) for m, dtype in zip(matrices, wide, strict=True)]
        self._starts = [_orthonormal(q.to(m)) for q, m in zip(starts, self.matrices, strict=True)]
        self._finite: list[Tensor] = []
        self._rows: list[Tensor] = []

    def rows(self) -> list[Tensor]:
        """Return M Q (n, r) of each matrix, to be added over ranks."""
        return [m @ q for m, q in zip(self.matrices, self._starts, strict=True)]

    def columns(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Return M^T P (m, r) of each matrix, to be averaged over ranks, from the sums of `rows`."""
        self._finite = [p.isfinite().all() for p in sums]
        self._rows = [_orthonormal(p.to(m).nan_to_num()) for p, m in zip(sums, self.matrices, strict=True)]
        return [m.T @ p for p, m in zip(self._rows, self.matrices, strict=True)]

    def means(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """Return P Q^T (n, m), all NaN where a rank's matrix is not finite, from the means of `columns`."""
        rows = zip(self._rows, factors, self._finite, strict=True)
        return [torch.where(ok & q.isfinite().all(), p @ q.to(p).T, torch.nan) for p, q, ok in rows]


def _orthonormal(columns: Tensor) -> Tensor:
    found: Tensor = torch.linalg.qr(columns).Q
    return found


def _usable(factor: Tensor, first: Tensor) -> Tensor:
    """Return Q to go on with: begun anew where it is not finite, and in columns of zeros, which would stay."""
    return torch.where(factor.isfinite().all() & (factor != 0).any(0), factor, first.to(factor))


class Late:
    """Parts of a step's buckets that wait for the last one: all of them take two collectives, and few bytes."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.done: Future[None] = Future()
        """Ends with their exchange."""

    def end(self, exchanged: Future[None]) -> None:
        """Pass on how the exchange has ended."""
        if (error := exchanged.exception()) is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


class LowRankExchange:
    """The mean over ranks of parts of buckets that have layers in low rank; the rest goes beside their P.

    Stages as in `Exchange`. There are two all-reduces: of P, and of Q. Residuals are in the gradients already.
    """

    def __init__(self, state: APSState, parts: Sequence[Part]) -> None:
        self.groups = state.groups
        self.memory = state.memory
        self.size = state.groups.size
        self.dtype = parts[0].sending.dtype or parts[0].views[0].dtype
        self.message = torch.empty(0, dtype=self.dtype, device="cpu")
        rows = [row for part in parts for row in zip(part.views, part.parameters, part.ranks, strict=True)]
        self.plain = [view for view, _, rank in rows if not rank]
        self.parameters = [parameter for _, parameter, rank in rows if rank]
        self.views = [view for view, _, rank in rows if rank]
        self.shapes = [(p.shape[0], p.numel() // p.shape[0]) for p in self.parameters]
        self.firsts = [state.memory.first(p, rank) for _, p, rank in rows if rank]

    def start(self) -> None:
        """Do nothing: no exponents are exchanged."""

    add = share = start

    def prepare(self) -> None:
        """Multiply by the last step's Q."""
        pairs = zip(self.parameters, self.firsts, strict=True)
        starts = [self.memory.start(p, q.shape[1]) for p, q in pairs]
        matrices = [view.reshape(shape) for view, shape in zip(self.views, self.shapes, strict=True)]
        self.factors = Factors(matrices, starts)
        self.message = _joined([*self.factors.rows(), *self.plain], self.dtype)

    def scatter(self) -> None:
        """Add P, and what is sent beside it, over ranks."""
        dist.all_reduce(self.message, group=self.groups.payload)

    def reduce(self) -> None:
        """Average what is sent beside P; multiply by the orthonormal P."""
        shapes = [(n, q.shape[1]) for (n, _), q in zip(self.shapes, self.firsts, strict=True)]
        sums = iter(_parts(self.message, [*shapes, *(view.shape for view in self.plain)]))
        rows = [next(sums) for _ in self.views]
        for view, total in zip(self.plain, sums, strict=True):
            view.copy_(total).div_(self.size)
        self.message = _joined(self.factors.columns(rows), self.dtype)

    def gather(self) -> None:
        """Add Q over ranks."""
        dist.all_reduce(self.message, group=self.groups.gather)

    def finish(self) -> None:
        """Write P Q^T where the layers lie; keep Q and what P Q^T misses of this rank's matrices."""
        sums = _parts(self.message, [q.shape for q in self.firsts])
        means = [q.to(m.dtype).div_(self.size) for q, m in zip(sums, self.factors.matrices, strict=True)]
        products = self.factors.means(means)
        lost = [m - product for m, product in zip(self.factors.matrices, products, strict=True)]
        for k, parameter in enumerate(self.parameters):
            self.views[k].copy_(products[k].view_as(self.views[k]))
            self.memory.residuals[parameter] = lost[k].nan_to_num_(0, 0, 0).flatten()
            self.memory.factors[parameter] = _usable(means[k], self.firsts[k])


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([x.reshape(-1).to(dtype) for x in tensors])


def _parts(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), map(tuple, shapes), strict=True)]


def errors_of(
    layers: Sequence[tuple[Tensor, Tensor]], rank: int, memory: Memory, group: dist.ProcessGroup, *, in_force: bool
) -> Tensor:
    """Return the squared error (float64, one a layer) of the mean gradient that ranks would make of P Q^T.

    `layers` are parameters with this rank's gradients. Those that go in low rank, `in_force`, go once more with their
    residuals. Others go `PASSES` times from none, so that Q knows the gradient. No rank has the mean gradient: the
    squared norm is that of a random sketch of each rank's error, which ranks can average.
    """
    size = dist.get_world_size(group)
    gradients = [g.reshape(p.shape[0], -1) for p, g in layers]
    owed = [memory.residuals.get(p) if in_force else None for p, _ in layers]
    lost = [torch.zeros_like(g) if r is None else r.view_as(g) for g, r in zip(gradients, owed, strict=True)]
    factors = [memory.start(p, rank) for p, _ in layers]
    products = gradients
    for _ in range(1 if in_force else PASSES):
        matrices = [g + r for g, r in zip(gradients, lost, strict=True)]
        step = Factors(matrices, factors)
        sums = _reduced(step.rows(), group)
        factors = [q / size for q in _reduced(step.columns(sums), group)]
        products = step.means(factors)
        lost = [m - product for m, product in zip(matrices, products, strict=True)]
    sketches = torch.stack([_sketch(x - g) for x, g in zip(products, gradients, strict=True)])
    dist.all_reduce(sketches, group=group)
    return (sketches / size).square().sum(1)


def _reduced(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    flat = _joined(tensors, tensors[0].dtype)
    dist.all_reduce(flat, group=group)
    return _parts(flat, [x.shape for x in tensors])


def _sketch(x: Tensor) -> Tensor:
    """Return sums of elements with random signs (float64, `SKETCH`): linear, its squared norm is x's on average."""
    generator = torch.Generator("cpu").manual_seed(x.numel())
    place = torch.randint(2 * SKETCH, (x.numel(),), generator=generator, device="cpu").to(x.device)
    sums = x.new_zeros(2 * SKETCH, dtype=torch.float64).index_add_(0, place, x.reshape(-1).double())
    return sums[:SKETCH] - sums[SKETCH:]
