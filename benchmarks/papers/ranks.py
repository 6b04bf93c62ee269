"""Many ranks in one process: a gradient for each by `vmap`, and the exchange's own arithmetic on all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.papers.claims import Claim, no_worse
from fxprec.runtime.aps.coder import Coder
from fxprec.runtime.aps.exponents import exponent_codes, factor_exponents
from fxprec.runtime.aps.options import Accumulate, Scaling
from fxprec.runtime.aps.wire import wire_of


@dataclass(frozen=True)
class Exchange:
    """How gradients of all ranks become their mean; `format` None is float32. See `fxprec.aps.APSState`."""

    format: str | None = None
    scaling: Scaling = "aps"
    accumulate: Accumulate = "format"
    group_size: int | None = None

    def mean(self, grads: Tensor) -> Tensor:
        """Of one layer's gradients (ranks, elements); every element is summed in the ring order of the first chunk."""
        ranks = len(grads)
        if self.format is None:
            return grads.mean(0)
        if not bool(grads.isfinite().all()):
            return torch.full_like(grads[0], torch.nan)
        coder = Coder(wire_of(self.format), None, bounded=False)
        values, exponent = self._scaled(grads, coder.wire.top)
        sent = coder.round(values.reshape(-1)).view(values.shape)
        if self.accumulate == "fp32":
            total, second = self._rescaled(sent.sum(0), coder.wire.top)
            total, exponent = coder.round(total), exponent + second
        else:
            total = self._in_format(sent, coder)
        return total * 2.0**-exponent / (1 if self.scaling == "none" else ranks)

    def _scaled(self, grads: Tensor, top: int) -> tuple[Tensor, int]:
        if self.scaling != "aps":
            return grads / (len(grads) if self.scaling == "none" else 1), 0
        terms = 1 if self.accumulate == "fp32" else len(grads)
        exponent = int(factor_exponents(exponent_codes(grads.abs().max()[None], terms), top)[0])
        return grads * 2.0**exponent, exponent

    def _rescaled(self, total: Tensor, top: int) -> tuple[Tensor, int]:
        if self.scaling != "aps" or not bool(total.any()):
            return total, 0
        exponent = int(factor_exponents(exponent_codes(total.abs().max()[None]), top)[0])
        return total * 2.0**exponent, exponent

    def _in_format(self, sent: Tensor, coder: Coder) -> Tensor:
        """Each group in rank order, all groups at once, then the masters."""
        size = self.group_size or len(sent)
        groups = sent.view(-1, size, sent.shape[1])
        masters = self._chain(groups.transpose(0, 1), coder)
        return self._chain(masters[:, None], coder)[0]

    def _chain(self, terms: Tensor, coder: Coder) -> Tensor:
        """Sum over the first dimension, every operation rounded."""
        total = terms[0]
        lost = torch.zeros_like(total)

        def rounded(x: Tensor) -> Tensor:
            return coder.round(x.reshape(-1)).view(x.shape)

        for term in terms[1:]:
            if self.accumulate == "format":
                total = rounded(total + term)
                continue
            term = rounded(term - lost)
            moved = rounded(total + term)
            lost = rounded(rounded(moved - total) - term)
            total = moved
        return total


FP32 = Exchange()
SIDES = ("float32", "1-4-3 APS", "1-4-3", "1-5-2 APS", "1-5-2")


def exchange_of(side: str) -> Exchange:
    """Of one of `SIDES`; without APS as the paper's emulator: neither scaled nor divided, overflow is inf."""
    if side == "float32":
        return FP32
    fmt = side.removesuffix(" APS")
    return Exchange(fmt) if side.endswith("APS") else Exchange(f"{fmt}:ieee", "raw")


def aps_helps(loss: str, margin: float, published: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    """With APS no format is worse than without, with the paper's figures."""
    column = next(iter(published["float32"]))
    figures = {side: f"{cells[column]:.2f}" for side, cells in published.items()}
    return [
        Claim(
            f"With APS {fmt} is no worse than without (paper: {figures[f'{fmt} APS']} and {figures[fmt]})",
            no_worse(f"{fmt} APS", fmt, loss, margin, is_loss=True),
        )
        for fmt in ("1-4-3", "1-5-2")
    ]


Batch = tuple[Tensor, Tensor]


@dataclass
class Run:
    """What one training gave."""

    losses: list[float] = field(default_factory=list)
    held_out_loss: float = math.nan
    """NaN where it is not finite or worse than chance."""
    accuracy: float = math.nan
    """Percent; of ten classes 10 where nothing is learned."""

    def curve(self, steps: int) -> list[float]:
        """Losses of all steps, the last one repeated where training broke off."""
        return self.losses + [self.losses[-1]] * (steps - len(self.losses))


class Ranks:
    """A classifier on ``ranks`` simulated ranks. Norms see their own rank's batch."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self.model, self.ranks = model, ranks
        self.parameters = {name: p.detach() for name, p in model.named_parameters()}

    def gradients(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """(ranks, elements) of each parameter, of a batch shared out in order."""

        def loss(parameters: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.model, dict(parameters), (x,)), y)

        shared = (x.view(self.ranks, -1, *x.shape[1:]), y.view(self.ranks, -1, *y.shape[1:]))
        found = vmap(grad(loss), in_dims=(None, 0, 0))(self.parameters, *shared)
        return {name: g.reshape(self.ranks, -1) for name, g in found.items()}

    def train(
        self,
        batches: Sequence[Batch],
        exchange: Callable[[int, str], Exchange],
        lr: float,
        decay: float = 1e-4,
        lars: float | None = None,
    ) -> list[float]:
        """SGD with momentum, the rate rising and falling as in the paper's one-cycle schedule; losses by step.

        ``exchange`` gives the way of a step's parameter. ``lars`` is its trust coefficient (You et al. 2017).
        """
        momentum = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        losses = []
        for step, (x, y) in enumerate(batches):
            rate = lr * _one_cycle(step / len(batches))
            found = self.gradients(x, y)
            for name, p in self.parameters.items():
                g = exchange(step, name).mean(found[name]).view(p.shape) + decay * p
                if lars is not None:
                    g = g * lars * p.norm() / (g.norm() + 1e-9) if p.dim() > 1 else g
                momentum[name] = 0.9 * momentum[name] + g
                self.parameters[name] = p - rate * momentum[name]
            losses.append(self.loss(x, y))
            if not math.isfinite(losses[-1]):
                break
        return losses

    def loss(self, x: Tensor, y: Tensor) -> float:
        """Of a batch."""
        with torch.no_grad():
            return float(F.cross_entropy(functional_call(self.model, self.parameters, (x,)), y))

    def accuracy(self, x: Tensor, y: Tensor) -> float:
        """In percent."""
        with torch.no_grad():
            return 100 * float((functional_call(self.model, self.parameters, (x,)).argmax(1) == y).float().mean())


def _one_cycle(share: float) -> float:
    """From 0 to 1 over the first fifth, to 0 over the rest."""
    return min(share / 0.2, (1 - share) / 0.8)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = _conv(width, width), _conv(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    norm = nn.BatchNorm2d(outputs, track_running_stats=False)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), norm)


def plain_cnn(width: int = 8) -> nn.Module:
    """No normalisation, as DavidNet's last layers have little of it: gradients are small at the start."""
    layers = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32 * width, 32), nn.ReLU(), nn.Linear(32, 10))


def residual_cnn(width: int = 8) -> nn.Module:
    """Two residual blocks with batch norm, halved between them."""
    half = nn.Conv2d(width, 2 * width, 2, stride=2)
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(
        _conv(1, width), nn.ReLU(), _Block(width), half, _Block(2 * width), pooled, nn.Linear(2 * width, 10)
    )


def digits(seed: int, batch: int, steps: int) -> Iterator[Batch]:
    """Batches of 8x8 digits, epoch after epoch."""
    from benchmarks.papers import images

    x, y, _, _ = images.digits(8, 1)
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(y), generator=generator) for _ in range(1 + steps * batch // len(y))])
    for step in range(steps):
        pick = order[step * batch : (step + 1) * batch]
        yield x[pick], y[pick]


def train(
    make: Callable[[], nn.Module],
    seed: int,
    ranks: int,
    batches: Sequence[Batch],
    exchange: Exchange | Callable[[int, str], Exchange],
    lr: float,
    lars: float | None = None,
) -> Run:
    """Train from a seed and judge on the digits held out."""
    from benchmarks.papers import images

    torch.manual_seed(seed)
    model = Ranks(make(), ranks)
    way = exchange if callable(exchange) else lambda step, name: exchange
    run = Run(model.train(batches, way, lr, lars=lars))
    _, _, x, y = images.digits(8, 1)
    loss = model.loss(x, y)
    run.held_out_loss = loss if math.isfinite(loss) and loss < math.log(10) else math.nan
    run.accuracy = model.accuracy(x, y) if math.isfinite(loss) else 10.0
    return run
