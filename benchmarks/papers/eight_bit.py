"""What the tables on 8-bit approximations share: the data types, one bit, and a tensor that crosses a network in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.papers.claims import Predicate, Verdict
from benchmarks.papers.found import Found
from benchmarks.papers.one_bit import dequantize, quantize
from fxprec.demo.data import Digits, load_digits
from fxprec.runtime.aps import codecs
from fxprec.runtime.aps.codecs import codec

ONE_BIT = "1-bit"
TYPES = ("dynamic-tree", "linear", "mantissa", "static-tree")
WIDTH, DROPOUT = 128, (0.2, 0.3, 0.3)
LEVEL = 0.01  # of the tests, as in the paper


def sent(x: Tensor, name: str) -> Tensor:
    """What arrives of a tensor sent in 8 bits, or in one bit a number and two float32 a row."""
    if name == ONE_BIT:
        rows = len(x) if x.dim() > 1 else 1
        slots = torch.arange(rows).repeat_interleave(x.numel() // rows)
        positive, means = quantize(x.flatten(), slots, rows)
        return dequantize(positive, slots, means).view_as(x)
    c = codec(name)
    return codecs.decode(*codecs.encode(x, c), c)


class WithFeedback:
    """`sent`, and what it took goes with the parameter's next gradient."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lost: dict[nn.Parameter, Tensor] = {}

    def __call__(self, p: nn.Parameter) -> Tensor:
        wanted = p.grad + self.lost.get(p, 0.0)
        found = sent(wanted, self.name)
        self.lost[p] = wanted - found
        return found


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, parts: int) -> Tensor:
        ctx.name, ctx.parts = name, parts
        return torch.cat([sent(part, name) for part in x.chunk(parts)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat([sent(part, ctx.name) for part in grad.chunk(ctx.parts)]), None, None


def crossing(x: Tensor, name: str | None, sub_batches: int = 1) -> Tensor:
    """Activations sent forward, their gradients sent back, each sub-batch by itself; as it is for None."""
    return x if name is None else _Crossing.apply(x, name, sub_batches)


class Network(nn.Module):
    """64 - 128 - 128 - 10 with dropout; ``crosses`` names the type in which each layer's result is sent, in ``sub_batches``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)])
        self.crosses: str | None = None
        self.sub_batches = 1

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer, p in zip(self.layers, DROPOUT, strict=True):
            x = layer(functional.dropout(x, p, self.training))
            x = crossing(x if layer is self.layers[-1] else x.relu(), self.crosses, self.sub_batches)
        return x


Send = Callable[[nn.Parameter], Tensor]


def train(model: nn.Module, data: Digits, optimizer: Any, epochs: int, send: Send | None = None) -> None:
    """Batches of 128; ``send`` says what arrives of a parameter's gradient."""
    for _ in range(epochs):
        for chosen in torch.randperm(len(data.train_labels)).split(128):
            optimizer.zero_grad()
            functional.cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen]).backward()
            for p in model.parameters() if send is not None else ():
                p.grad = send(p)
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


def same_as_float32(column: str = "test error, %", without: str = ONE_BIT, only: str = "") -> Predicate:
    """Welch's test of rows against 32 bits: those named ``only`` so, or all but those named ``without``.

    The level is shared out over the rows (Bonferroni).
    """

    def judge(found: Found) -> Verdict:
        from scipy import stats

        rows = [only] if only else [row for row in found.rows if row != "32-bit" and without not in row]
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
