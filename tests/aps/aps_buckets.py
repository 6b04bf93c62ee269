"""Gradients of every awkward kind, and the hook called on them as DistributedDataParallel would."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxprec.aps import APSState, aps_hook

SIZES = (37, 0, 1, 64, 200)


class FakeBucket:
    """What a hook sees of DDP's bucket."""

    def __init__(self, gradients: list[Tensor], parameters: list[Tensor], index: int = 0, last: bool = True) -> None:
        self._buffer = torch.cat([g.reshape(-1) for g in gradients]) if gradients else torch.empty(0)
        self._views = list(self._buffer.split([g.numel() for g in gradients])) if gradients else []
        self._parameters, self._index, self._last = parameters, index, last

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self._views

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


def parameters_like(layers: list[Tensor]) -> list[Tensor]:
    return [nn.Parameter(torch.empty_like(g)) for g in layers]


def exchange(state: APSState, layers: list[Tensor], parameters: list[Tensor] | None = None) -> Tensor:
    """The mean over ranks of one bucket, flat."""
    bucket = FakeBucket(layers, parameters_like(layers) if parameters is None else parameters)
    return aps_hook(state, bucket).wait().clone()


def gradients_of(rank: int, case: str = "plain", sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    """Gradients of one rank; any rank can make any other's."""
    g = torch.Generator().manual_seed(1000 + rank)
    layers = [torch.randn(n, generator=g) * 10.0 ** (3 * i - 6) for i, n in enumerate(sizes)]
    if case == "zero-layer" or (case == "zero-on-one-rank" and rank == 1):
        layers[3].zero_()
    elif case == "huge" and rank == 1:
        layers[0][5] = 3e38
    elif case == "denormal":
        layers[0] = torch.randint(-200, 200, (sizes[0],), generator=g) * 2.0**-149
    elif case == "nan" and rank == 1:
        layers[3][7] = torch.nan
    elif case == "inf" and rank == 0:
        layers[0][0] = torch.inf
    elif case == "power":
        layers[4] = torch.where(layers[4] > 0, 2.0**-3, torch.nextafter(torch.tensor(2.0**-3), torch.tensor(1.0)))
    return layers


def mean_of_ranks(ranks: list[int], case: str = "plain") -> Tensor:
    """The exact mean, in float32, flat."""
    return torch.stack([torch.cat(gradients_of(r, case)) for r in ranks]).double().mean(0).float()
