"""What the tables on 8-bit approximations share: the data types, and a tensor that crosses a network in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.papers.claims import Predicate, Verdict
from benchmarks.papers.found import Found
from fxprec.demo.data import Digits, load_digits
from fxprec.runtime.aps import codecs
from fxprec.runtime.aps.codecs import Codec, codec

TYPES = ("dynamic-tree", "linear", "mantissa", "static-tree")
WIDTH, DROPOUT = 128, (0.2, 0.3, 0.3)
LEVEL = 0.01  # of the tests, as in the paper


def sent(x: Tensor, c: Codec) -> Tensor:
    """What arrives of a tensor sent in 8 bits."""
    return codecs.decode(*codecs.encode(x, c), c)


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, c: Codec) -> Tensor:
        ctx.codec = c
        return sent(x, c)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sent(grad, ctx.codec), None


def crossing(x: Tensor, name: str | None) -> Tensor:
    """Activations sent forward, their gradients sent back; as it is for None."""
    return x if name is None else _Crossing.apply(x, codec(name))


class Network(nn.Module):
    """64 - 128 - 128 - 10 with dropout; ``crosses`` names the type in which each layer's result is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)])
        self.crosses: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer, p in zip(self.layers, DROPOUT, strict=True):
            x = layer(functional.dropout(x, p, self.training))
            x = crossing(x if layer is self.layers[-1] else x.relu(), self.crosses)
        return x


def train(model: nn.Module, data: Digits, optimizer: Any, gradients: dict[nn.Parameter, str], epochs: int) -> None:
    """Batches of 128; the parameters in ``gradients`` have theirs sent in that type."""
    for _ in range(epochs):
        for chosen in torch.randperm(len(data.train_labels)).split(128):
            optimizer.zero_grad()
            functional.cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen]).backward()
            for p, name in gradients.items():
                p.grad = sent(p.grad, codec(name))
            optimizer.step()


def tested(model: nn.Module, data: Digits) -> dict[str, float]:
    """Loss and error in percent on the test images."""
    model.eval()
    with torch.no_grad():
        logits = model(data.test_images)
    wrong = float((logits.argmax(1) != data.test_labels).float().mean() * 100)
    return {"loss": float(functional.cross_entropy(logits, data.test_labels)), "test error, %": wrong}


def digits() -> Digits:
    """The 8x8 digits."""
    return load_digits()


def same_as_float32(column: str = "test error, %") -> Predicate:
    """Welch's test of every row against 32 bits; the level is shared out over the rows (Bonferroni)."""

    def judge(found: Found) -> Verdict:
        from scipy import stats

        rows = [row for row in found.rows if row != "32-bit"]
        base = found.samples("32-bit", column)
        if len(base) < 2:
            return Verdict("not shown", "one seed has no spread")
        p = {row: float(stats.ttest_ind(found.samples(row, column), base, equal_var=False).pvalue) for row in rows}
        gaps = [abs(found.mean(row, column) - found.mean("32-bit", column)) for row in rows]
        least = min(p, key=p.__getitem__)
        detail = f"{len(base)} seeds, largest gap {max(gaps):.3g}, least p {p[least]:.3f} ({least})"
        if p[least] >= LEVEL:
            return Verdict("holds", detail)
        return Verdict("fails" if p[least] * len(rows) < LEVEL else "not shown", detail)

    return judge
