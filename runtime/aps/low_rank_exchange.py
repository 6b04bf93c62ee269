"""Exchange layers in low rank, and the layers that go whole beside them, in two sums over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxprec.runtime.aps.bucket import Part, settle
from fxprec.runtime.aps.exchange import set_mean, sum_over_ranks
from fxprec.runtime.aps.low_rank import Factors, columns_of, joined, parted, usable
from fxprec.runtime.aps.state import APSState


class LowRankExchange:
    """The mean over ranks of parts of buckets in low rank; layers that are no such matrices go whole beside P.

    It has the stages of `Exchange`. There are two sums over ranks: of P, and of Q.
    """

    def __init__(self, state: APSState, parts: Sequence[Part]) -> None:
        self.state = state
        sending = parts[0].sending
        self.rank = sending.low_rank
        self.dtype = sending.dtype or parts[0].views[0].dtype
        self.message = torch.empty(0, dtype=self.dtype, device="cpu")
        rows = [row for part in parts for row in zip(part.parameters, part.views, strict=True)]
        self.plain = [(p, view) for p, view in rows if not columns_of(p, self.rank)]
        self.layers = [(p, view) for p, view in rows if columns_of(p, self.rank)]
        self.matrices = [view.reshape(p.shape[0], -1) for p, view in self.layers]
        """Gradients (n, m), in the memory of `layers` if strides allow it."""

    def start(self) -> None:
        """Do nothing: no exponents are exchanged."""

    add = share = start

    def prepare(self) -> None:
        """Add residuals, and multiply by the last step's Q."""
        memory = self.state.memory
        pairs = [(p, matrix) for (p, _), matrix in zip(self.layers, self.matrices, strict=True)]
        starts = [memory.start(p, matrix.shape[1], self.rank) for p, matrix in pairs]
        self.factors = Factors([memory.owe(p, matrix) for p, matrix in pairs], starts)
        for parameter, view in self.plain:
            settle(self.state, parameter, view)
        self.message = joined([*self.factors.rows(), *(view for _, view in self.plain)], self.dtype)

    def scatter(self) -> None:
        """Sum P, and the layers beside it, over ranks."""
        self.message = sum_over_ranks(self.message, self.state.groups.payload)

    def reduce(self) -> None:
        """Average the layers beside P; multiply by the orthonormal P."""
        shapes = [torch.Size((matrix.shape[0], self.rank)) for matrix in self.matrices]
        sums = parted(self.message, [*shapes, *(view.shape for _, view in self.plain)])
        for (_, view), total in zip(self.plain, sums[len(shapes) :], strict=True):
            set_mean(view, total, self.state.groups.size)
        if self.layers:
            self.message = joined(self.factors.columns(sums[: len(shapes)]), self.dtype)

    def gather(self) -> None:
        """Sum Q over ranks."""
        if self.layers:
            self.message = sum_over_ranks(self.message, self.state.groups.gather)

    def finish(self) -> None:
        """Write P Q^T into the layers; keep Q, and this rank's matrices minus P Q^T as residuals."""
        memory = self.state.memory
        if not self.layers:
            return
        sums = parted(self.message, [torch.Size((matrix.shape[1], self.rank)) for matrix in self.matrices])
        means = [q.to(m.dtype).div_(self.state.groups.size) for q, m in zip(sums, self.factors.matrices, strict=True)]
        for k, (p, q, is_finite) in enumerate(self.factors.pairs(means)):
            (parameter, view), matrix, owed = self.layers[k], self.matrices[k], self.factors.matrices[k]
            if matrix.dtype == p.dtype and matrix.data_ptr() == view.data_ptr():
                torch.mm(p, q.T, out=matrix)
            else:
                view.copy_((p @ q.T).view_as(view))
            owed.addmm_(p, q.T, alpha=-1)
            if owed.is_cuda or not is_finite:
                owed.masked_fill_(~is_finite, 0)  # on a CPU only if needed, because reading the flag is free there
            memory.factors[parameter] = usable(means[k], memory.first(matrix.shape[1], self.rank, q.device))
