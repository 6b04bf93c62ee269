"""Models with checkpointed regions, as newer versions of PyTorch's file and users have them: gradients and buffers are
those of the uncompiled model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config
import torch.nn.functional as F
from checkpointed import SIDE, Two, agree, region, selective
from models import Apply, Parts
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn.utils import parametrize
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten


class WritesInPlace(Two):
    def part(self, x: Tensor) -> Any:
        y = self.second(x)
        y.mul_(2).add_(x).relu_()
        return y.sin()


class WritesInPlaceByPolicy(Two):
    def forward(self, x: Tensor) -> Any:
        return selective({aten.sigmoid.default})(self.part, self.first(x))

    def part(self, x: Tensor) -> Any:
        return torch.sigmoid(F.selu(self.second(x), inplace=True)) * x


class WritesIntoAPart(Two):
    def part(self, x: Tensor) -> Any:
        y = self.second(x)
        y[:, : SIDE // 2] = x[:, SIDE // 2 :].sin()
        return y @ self.second.weight


class SavesViews(Two):
    def forward(self, x: Tensor) -> Any:
        return selective({aten.view.default, aten.t.default, aten.permute.default})(self.part, self.first(x))

    def part(self, x: Tensor) -> Any:
        y = self.second(x).view(4, 4, SIDE).permute(1, 0, 2)
        return (y.sigmoid() @ self.second.weight.t()).cos()


class SavesBySlices(Two):
    def forward(self, x: Tensor) -> Any:
        return selective({aten.slice.Tensor, aten.addmm.default})(self.part, self.first(x))

    def part(self, x: Tensor) -> Any:
        gate, value = self.second(x).chunk(2, 1)
        return gate.sigmoid() * value.tanh()


def parametrized() -> nn.Module:
    """A weight that a region makes."""
    made = Apply(lambda w: selective({aten.mul.Tensor})(lambda v: torch.sigmoid(v * v) - 0.5, w))
    layers = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE, bias=False))
    parametrize.register_parametrization(layers[2], "weight", made)
    return layers


def wrapped() -> nn.Module:
    """Wrappers, one in another."""
    inner = checkpoint_wrapper(nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU()))
    outer = nn.Sequential(nn.LayerNorm(SIDE), inner, nn.Linear(SIDE, SIDE))
    return nn.Sequential(checkpoint_wrapper(outer, checkpoint_impl=CheckpointImpl.REENTRANT))


class NormOfBatches(Two):
    """Statistics of a batch; what they update is not in the region."""

    def part(self, x: Tensor) -> Any:
        return F.batch_norm(self.second(x.sin()).sigmoid(), None, None, training=True).relu()


class ReadsABuffer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(SIDE))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Any:
        self.seen.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)

    def part(self, x: Tensor) -> Any:
        return self.second(x - self.seen).tanh() * self.seen.exp()


class OtherThings(Two):
    """Numbers, names and None among what a region is given and gives."""

    def forward(self, x: Tensor) -> Any:
        found = region(self.named, self.first(x), {"times": 2.0, "other": None}, name="a")
        return found["y"], found["more"][0], found["rows"]

    def named(self, x: Tensor, given: dict[str, Any], *, name: str) -> dict[str, Any]:
        y = self.second(x).tanh() * given["times"]
        return {"y": y, "more": (y.exp(), None, name), "rows": x.shape[0]}


class OneOfThreeIsRead(Two):
    def forward(self, x: Tensor) -> Any:
        kept, _, told = region(self.three, self.first(x))
        return kept, told.detach()

    def three(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.second(x)
        return y.tanh(), y.exp(), y.sigmoid()


def embedded() -> nn.Module:
    """A region that reads whole numbers, and has no input with a gradient."""

    def call(m: Any, x: Tensor) -> Any:
        places = (x * 4).long().clamp(0, 7)
        return region(lambda p: m.layer(m.table(p).sum(1)).tanh(), places) * x

    return Parts(call, table=nn.Embedding(8, SIDE), layer=nn.Linear(SIDE, SIDE))


class Frozen(Two):
    def __init__(self) -> None:
        super().__init__()
        self.second.requires_grad_(False)


class Repeated(Two):
    def forward(self, x: Tensor) -> Any:
        for step in range(3):
            x = region(lambda y, s: self.part(y) + s, x, step)
        return x


class ReentrantInside(Two):
    def part(self, x: Tensor) -> Any:
        return checkpoint(lambda y: self.second(y).sin(), x.cos(), use_reentrant=True) * x


class WithoutAutocast(Two):
    """A part that stays in float32 where the rest does not."""

    def part(self, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.second(x.float()).tanh()


class Recurrent(nn.Module):
    """A region a step of time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        state = (x.sin(), x.cos())
        for _ in range(3):
            state = region(self.cell, x, state)
        return state[0]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(SIDE, 2, 32, dropout=0.1, batch_first=True)
    mask = torch.full((4, 4), float("-inf")).triu(1)
    return Parts(lambda m, x: region(m.layer, x.view(4, 4, SIDE), src_mask=mask, is_causal=True), layer=layer)


def image() -> nn.Module:
    """Convolutions that a policy saves."""
    call = selective({aten.convolution.default})
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 2, 3, stride=2))
    return Parts(lambda m, x: call(m.layers, x.view(4, 1, 8, 8)[:, :, :7]), layers=layers)


class Prefers:
    """An object as policy."""

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_SAVE if op is aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


PREFERS = partial(create_selective_checkpoint_contexts, Prefers())


class AnObjectsPolicy(Two):
    def forward(self, x: Tensor) -> Any:
        return region(self.part, self.first(x), context_fn=PREFERS)


class Mapped(Two):
    def part(self, x: Tensor) -> Any:
        return torch.vmap(lambda row: F.normalize(self.second.weight @ row, dim=0))(x)


@torch.library.custom_op("fxprec_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x / 2


halved.register_fake(torch.empty_like)
halved.register_autograd(lambda ctx, grad: grad / 2)


class OwnOperator(Two):
    def forward(self, x: Tensor) -> Any:
        return selective({torch.ops.fxprec_tests.halved.default})(self.part, self.first(x))

    def part(self, x: Tensor) -> Any:
        return halved(self.second(x)).tanh() @ x


MODELS: tuple[Callable[[], nn.Module], ...] = (
    WritesInPlace,
    WritesInPlaceByPolicy,
    WritesIntoAPart,
    SavesViews,
    SavesBySlices,
    parametrized,
    wrapped,
    NormOfBatches,
    ReadsABuffer,
    OtherThings,
    OneOfThreeIsRead,
    embedded,
    Frozen,
    Repeated,
    ReentrantInside,
    WithoutAutocast,
    Recurrent,
    encoder,
    image,
    AnObjectsPolicy,
    Mapped,
    OwnOperator,
)


@pytest.mark.parametrize("made", MODELS, ids=lambda made: made.__name__)
def test_gradients_of_a_checkpointed_model_are_those_of_the_uncompiled_model(made: Callable[[], nn.Module]) -> None:
    agree(made)
