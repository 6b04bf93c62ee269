"""`fxprec::laid_out` against torch's own copies, and convolutions' weights and gradients in compiled steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pytest
import torch
import torch._inductor.config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import Graph

import fxprec
from fxprec.errors import NativeArgumentError
from fxprec.kernels.layout import LaidOut
from fxprec.passes.lowering import lower, weights
from fxprec.runtime.cpu import layout

FORMATS = {True: torch.channels_last, False: torch.contiguous_format}
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-45, 3.4e38, 1.00390625, 1.01171875]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.itemsize == 4 else torch.int16)


@settings(deadline=None, max_examples=60)
@given(
    shape=st.tuples(st.integers(0, 5), st.integers(1, 150), st.integers(1, 9), st.integers(1, 9)),
    dtypes=st.tuples(*2 * [st.sampled_from([torch.float32, torch.bfloat16])]),
    channels_last=st.booleans(),
    given_as=st.sampled_from(["contiguous", "channels last", "slice"]),
    seed=st.integers(0, 99),
)
def test_laid_out_converts_as_torch_does(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], channels_last: bool, given_as: str, seed: int
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0 ** ((seed % 7) - 3)
    flat = x.view(-1)
    flat[: len(SPECIAL)] = torch.tensor(SPECIAL)[: flat.numel()]
    x = x.to(dtypes[0])
    if given_as == "slice":
        x = torch.cat([x, x], 3)[..., ::2]
    elif given_as == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    y = layout.laid_out(x, dtypes[1], channels_last)
    wanted = x.to(dtypes[1]).contiguous(memory_format=FORMATS[channels_last])
    assert y.is_contiguous(memory_format=FORMATS[channels_last])
    assert torch.equal(y.isnan(), wanted.isnan())
    assert torch.equal(bits(y)[~y.isnan()], bits(wanted)[~wanted.isnan()])


def test_laid_out_takes_other_dtypes_and_no_memory_that_was_freed() -> None:
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    assert torch.equal(layout.laid_out(x, torch.float16, True), x.half())
    freed = torch.randn(3, 4, 5, 6)
    freed.untyped_storage().resize_(0)
    with pytest.raises(NativeArgumentError, match="x is 360 elements of float32 on cpu with strides"):
        layout.laid_out(freed, torch.bfloat16, True)


def test_laid_out_is_an_operator_as_torch_wants_them() -> None:
    for x in (torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        for last in (False, True):
            torch.library.opcheck(
                torch.ops.fxprec.laid_out.default,
                (x, torch.bfloat16, last),
                test_utils=("test_schema", "test_faketensor"),
            )


class Net(nn.Module):
    """Weights of 64 x 64 x 3 x 3 that convolve once, or twice, or are read by the loss too; and what is not turned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.once = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1, bias=False)
        self.twice, self.seen = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, stride=2)
        self.norm, self.point = nn.BatchNorm2d(64), nn.Conv2d(64, 512, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.once(torch.relu(self.first(x)))))
        x = torch.relu(self.twice(torch.relu(self.twice(x))))
        x = self.point(torch.relu(self.seen(x)))
        return x.mean() + 0.01 * self.seen.weight.square().sum()


@pytest.fixture
def laid(monkeypatch: pytest.MonkeyPatch) -> list[Counter[bool]]:
    """Calls in each graph that is lowered, by whether what they make is channels-last."""
    found: list[Counter[bool]] = []

    def counting(graph: Graph, gradients: Collection[int]) -> None:
        weights.lay_out_weights(graph, gradients)
        found.append(Counter(call.channels_last for _, call in LaidOut.among(LaidOut.nodes(graph))))

    monkeypatch.setattr(lower, "lay_out_weights", counting)
    return found


def step(recipe: str, memory_format: torch.memory_format) -> tuple[Tensor, nn.Module, dict[str, tuple[int, ...]]]:
    """Return the loss, the model, and the strides of gradients as backward returns them."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, strides = Net().to(memory_format=memory_format), {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: strides.update({name: gradient.stride()}))
    with torch._inductor.config.patch(fx_graph_cache=False):  # what is patched here is in no key
        loss = torch.compile(model, backend=fxprec.Backend(fxprec.Config(recipe=recipe)))(torch.randn(4, 3, 12, 12))
        loss.backward()
    return loss.detach(), model, strides


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_a_gradient_lies_as_its_parameter_and_has_the_same_bits(
    recipe: str, laid: list[Counter[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, model, strides = step(recipe, torch.contiguous_format)
    forward, backward = laid
    assert forward == {True: 3}  # once, twice, seen
    assert backward[False] == 1
    assert strides["once.weight"] == model.once.weight.stride()
    monkeypatch.setattr(lower, "lay_out_weights", lambda graph, gradients: None)
    other_loss, other, other_strides = step(recipe, torch.contiguous_format)
    assert other_strides["once.weight"] == torch.empty(64, 64, 3, 3).to(memory_format=torch.channels_last).stride()
    assert torch.equal(loss, other_loss)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_nothing_is_turned_where_parameters_are_channels_last(laid: list[Counter[bool]]) -> None:
    _, model, strides = step("bf16", torch.channels_last)
    assert laid == [{}, {}]
    assert strides["once.weight"] == model.once.weight.stride()
