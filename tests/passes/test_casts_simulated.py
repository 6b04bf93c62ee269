"""Simulated casts against an eager emulation that rounds exactly where it should, bit for bit.

Definitions: docs/algorithms.md, "Where rounding happens".
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from emulator import Emulator, Value
from helpers import assert_bits_equal, compiled, eager_backend, gradients

from fxprec.config.recipes import HFP8, Recipe


class CNN(nn.Module):
    """Convolutions, batch norms, a residual join, a concat, a global mean and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.left = nn.Conv2d(8, 4, 1)
        self.right = nn.Conv2d(8, 12, 3, padding=1)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)) + x)
        x = torch.cat([self.left(x), self.right(x)], dim=1)
        return F.cross_entropy(self.fc(x.mean(dim=(2, 3))), y)


def batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    mean, var = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    return torch.ops.aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, True, 0.1, 1e-5)[0]


def emulate_cnn(e: Emulator, m: CNN, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def conv(c: nn.Conv2d, x: Value) -> Value:
        bias = [] if c.bias is None else [e.param(c.bias, x)]
        padding = c.padding
        return e.op(lambda x, w, b=None: F.conv2d(x, w, b, 1, padding), x, e.param(c.weight, x), *bias, gemm=True)

    def norm(bn: nn.BatchNorm2d, x: Value) -> Value:
        return e.op(batch_norm, x, e.param(bn.weight, x), e.param(bn.bias, x))

    h = e.relu(norm(m.bn1, conv(m.conv1, e.input(x))))
    h = e.relu(e.op(torch.add, norm(m.bn2, conv(m.conv2, h)), h))
    h = e.op(lambda a, b: torch.cat([a, b], 1), conv(m.left, h), conv(m.right, h))
    h = e.op(lambda x: x.mean(dim=(2, 3)), h)
    h = linear(e, m.fc, h)
    return e.leave(cross_entropy(e, h, y))


def linear(e: Emulator, layer: nn.Linear, x: Value) -> Value:
    weight = e.view(torch.t, e.param(layer.weight, x))
    if layer.bias is None:
        return e.op(torch.mm, x, weight, gemm=True)
    return e.op(torch.addmm, e.param(layer.bias, x), x, weight, gemm=True)


def cross_entropy(e: Emulator, logits: Value, labels: torch.Tensor) -> Value:
    log_softmax = e.log_softmax(logits)
    return e.op(F.nll_loss, log_softmax, labels)


def run(model: nn.Module, args: tuple[torch.Tensor, ...], recipe: str | Recipe, **options: object):
    backend = eager_backend(recipe, storage="simulate", grad_scaling="none", promote_above=None, **options)
    loss = compiled(model, backend)(*args)
    loss.backward(seed_gradient(loss))
    return loss, gradients(model), backend.plans[0]


def seed_gradient(out: torch.Tensor) -> torch.Tensor:
    """The gradient the code outside sends in."""
    return torch.linspace(-1, 2, out.numel()).view(out.shape) if out.dim() else torch.ones(())


def compare(model, args, emulate, recipe=HFP8, **options):
    loss, grads, plan = run(model, args, recipe, **options)
    e = Emulator(recipe, plan.low_groups)
    wanted = emulate(e, model, *args)
    wanted.backward(seed_gradient(wanted))
    assert [dict(e.counts[g.id]) for g in plan.groups] == [
        {k: n for k, n in vars(g.elements_by_kind).items() if n} for g in plan.groups
    ]
    wanted_grads = gradients(model)
    assert grads.keys() == wanted_grads.keys()
    assert_bits_equal(loss, wanted, "loss")
    for name, grad in grads.items():
        assert_bits_equal(grad, wanted_grads[name], name)
    return plan


@pytest.mark.parametrize("low_ratio", [0.3, 1.0])
def test_cnn_matches_the_emulation_bit_for_bit(low_ratio):
    plan = compare(CNN(), (torch.randn(4, 3, 8, 8), torch.randint(5, (4,))), emulate_cnn, low_ratio=low_ratio)
    assert 0 < len(plan.low_groups) < 6 or low_ratio == 1.0


class Transformer(nn.Module):
    """One pre-norm block with a tied embedding; ``explicit`` spells the attention out."""

    def __init__(self, *, explicit: bool) -> None:
        super().__init__()
        self.explicit = explicit
        self.embed = nn.Embedding(11, 16)
        self.position = nn.Parameter(torch.randn(8, 16))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not self.explicit:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.softmax(q @ k.transpose(-1, -2) * 0.5, dim=-1) @ v

    def forward(self, codes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        batch, seq = codes.shape
        x = self.embed(codes) + self.position[:seq]
        q, k, v = (t.view(batch, seq, 2, 8).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, seq, 16))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        logits = F.linear(self.norm3(x), self.embed.weight)
        return F.cross_entropy(logits.view(-1, 11), labels.view(-1))


def emulate_transformer(e: Emulator, m: Transformer, codes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    batch, seq = codes.shape

    def norm(layer: nn.LayerNorm, x: Value) -> Value:
        return e.op(lambda x, w, b: F.layer_norm(x, (16,), w, b), x, e.param(layer.weight, x), e.param(layer.bias, x))

    def dense(layer: nn.Linear, x: Value) -> Value:
        return reshaped(linear(e, layer, reshaped(x, -1, layer.in_features)), batch, seq, layer.out_features)

    def reshaped(x: Value, *shape: int) -> Value:
        return e.view(lambda t: t.reshape(shape), x)

    def batched(x: Value, *shape: int) -> Value:
        return e.view(lambda t: t.clone(memory_format=torch.contiguous_format).view(shape), x)

    def attend(q: Value, k: Value, v: Value) -> Value:
        if not m.explicit:
            return e.attention(q, k, v)
        kt = e.view(lambda t: t.transpose(-1, -2), k)
        scores = e.op(torch.bmm, batched(q, batch * 2, seq, 8), batched(kt, batch * 2, 8, seq), gemm=True)
        weights = e.softmax(e.op(lambda x: x * 0.5, reshaped(scores, batch, 2, seq, seq)))
        mixed = e.op(torch.bmm, reshaped(weights, batch * 2, seq, seq), batched(v, batch * 2, seq, 8), gemm=True)
        return reshaped(mixed, batch, 2, seq, 8)

    x = e.op(F.embedding, codes, e.param(m.embed.weight, None))
    x = e.op(torch.add, x, e.view(lambda p: p[:seq], e.param(m.position, x)))
    qkv = dense(m.qkv, norm(m.norm1, x))
    heads = [e.view(lambda t, i=i: t.chunk(3, -1)[i].view(batch, seq, 2, 8).transpose(1, 2), qkv) for i in range(3)]
    mixed = e.view(lambda t: t.transpose(1, 2).reshape(batch, seq, 16), attend(*heads))
    x = e.op(torch.add, x, dense(m.out, mixed))
    x = e.op(torch.add, x, dense(m.down, e.op(F.gelu, dense(m.up, norm(m.norm2, x)))))
    table = e.view(torch.t, e.param(m.embed.weight, x))
    logits = e.op(torch.mm, reshaped(norm(m.norm3, x), -1, 16), table, gemm=True)
    return e.leave(cross_entropy(e, logits, labels.view(-1)))


@pytest.mark.parametrize(("low_ratio", "explicit"), [(0.5, False), (0.5, True), (1.0, False)])
def test_transformer_matches_the_emulation_bit_for_bit(low_ratio, explicit):
    args = (torch.randint(11, (3, 6)), torch.randint(11, (3, 6)))
    compare(Transformer(explicit=explicit), args, emulate_transformer, low_ratio=low_ratio)


class Program(nn.Module):
    """A random program over values of shape (4, 6): chains, branches, residual joins, concats and splits.

    Each instruction is (operation, operands, parameter); the last value is returned, the loss stays outside.
    """

    def __init__(self, seed: int, length: int = 14) -> None:
        super().__init__()
        pick = random.Random(seed)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(6, 6) / 2) for _ in range(3))
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(6)) for _ in range(2))
        self.code: list[tuple[str, int, int, int]] = []
        for i in range(length):
            name = pick.choice(
                ["mm", "mm", "add", "add", "sub", "mul", "relu", "bias", "softmax", "halves", "twice", "scale"]
            )
            near = [max(0, i - pick.randrange(3)) for _ in range(2)]
            self.code.append((name, *near, pick.randrange(6)))
        self.live = self._live()

    def _live(self) -> set[int]:
        """Values that reach the result: Dynamo drops the others."""
        live = {len(self.code), len(self.code) - 1}
        for i in reversed(range(len(self.code))):
            name, *operands, _ = self.code[i]
            if i + 1 in live:
                live.update(operands if name in ("add", "sub", "mul", "halves") else operands[:1])
        return live

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x @ self.weights[0]]
        for name, i, j, p in self.code:
            a, b = values[i], values[j]
            if len(values) not in self.live:
                values.append(a)  # never read
            elif name == "mm":
                values.append(a @ self.weights[p % 3])
            elif name == "bias":
                values.append(a + self.biases[p % 2])
            elif name == "halves":
                values.append(torch.cat([a[:, 3:], b[:, :3]], dim=1))
            elif name == "twice":
                values.append(a + a)
            elif name == "scale":
                values.append(a * 0.5)
            else:
                values.append(_PLAIN[name](a, b))
        return values[-1] + values[-2]


_PLAIN = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "relu": lambda a, _: a.relu(),
    "softmax": lambda a, _: a.softmax(-1),
}


def emulate_program(e: Emulator, m: Program, x: torch.Tensor) -> torch.Tensor:
    first = e.input(x)
    values = [e.op(torch.mm, first, e.param(m.weights[0], first), gemm=True)]
    for name, i, j, p in m.code:
        a, b = values[i], values[j]
        if len(values) not in m.live:
            values.append(a)
        elif name == "mm":
            values.append(e.op(torch.mm, a, e.param(m.weights[p % 3], a), gemm=True))
        elif name == "bias":
            values.append(e.op(torch.add, a, e.param(m.biases[p % 2], a)))
        elif name == "halves":
            parts = e.view(lambda t: t[:, 3:], a), e.view(lambda t: t[:, :3], b)
            values.append(e.op(lambda a, b: torch.cat([a, b], 1), *parts))
        elif name in ("twice", "scale"):
            values.append(e.op((lambda t: t + t) if name == "twice" else (lambda t: t * 0.5), a))
        elif name in ("relu", "softmax"):
            values.append(getattr(e, name)(a))
        else:
            values.append(e.op(_PLAIN[name], a, b))
    return e.leave(e.op(torch.add, values[-1], values[-2]))


# Chosen among 100: each of these once rounded a gradient once too often, or not at all.
@pytest.mark.parametrize("seed", [2, 11, 12, 21, 27, 45, 63, 69, 0])
def test_random_programs_match_the_emulation_bit_for_bit(seed):
    torch.manual_seed(seed)
    compare(Program(seed), (torch.randn(4, 6),), emulate_program, low_ratio=0.5)
