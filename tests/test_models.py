"""The example networks: GEMM operators, parameters, shapes, causality."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # examples/ is not installed

from examples.models.blocks import scaled
from examples.models.char_transformer import CharTransformer, six_layer
from examples.models.mobilenet import mobilenet_v2
from examples.models.resnet import resnet18
from examples.models.shufflenet import channel_shuffle, shufflenet_v2
from examples.models.small_cnn import SmallCNN
from examples.models.squeezenet import squeezenet

# Forward convolutions and linear layers: docs/algorithms.md, "Operators, tensors, groups".
GEMMS = {squeezenet: 26, shufflenet_v2: 57, mobilenet_v2: 58, resnet18: 21}
# What others count for the CIFAR forms of these networks, 10 classes, width 1.
PUBLISHED = {shufflenet_v2: 1_263_854, mobilenet_v2: 2_296_922, resnet18: 11_173_962}
CIFAR = pytest.mark.parametrize("make", GEMMS, ids=lambda make: make.__name__)


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def run_counting_gemms(model: nn.Module, *inputs: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the model's result and how many convolutions and linear layers it called."""
    calls: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    with torch.no_grad():
        return model(*inputs), len(calls)


@CIFAR
@pytest.mark.parametrize("width", [1.0, 0.5, 0.25, 0.1])
def test_cifar_network_calls_the_papers_gemms_at_every_width(make, width):
    logits, num_gemms = run_counting_gemms(make(width=width).eval(), torch.zeros(2, 3, 32, 32))
    assert num_gemms == GEMMS[make]
    assert logits.shape == (2, 100)


@pytest.mark.parametrize("make", PUBLISHED, ids=lambda make: make.__name__)
def test_parameters_match_the_published_count(make):
    assert num_parameters(make(10)) == PUBLISHED[make]


def test_squeezenet_parameters_match_the_closed_form():
    def conv_bn(inputs: int, outputs: int, kernel: int) -> int:
        return inputs * outputs * kernel**2 + 2 * outputs

    def fire(inputs: int, squeeze: int, outputs: int) -> int:
        half = outputs // 2
        return conv_bn(inputs, squeeze, 1) + conv_bn(squeeze, half, 1) + conv_bn(squeeze, half, 3)

    # Iandola et al. 2016, table 1, column s1x1 and e1x1 + e3x3.
    fires = [(96, 16, 128), (128, 16, 128), (128, 32, 256), (256, 32, 256)]
    fires += [(256, 48, 384), (384, 48, 384), (384, 64, 512), (512, 64, 512)]
    expected = conv_bn(3, 96, 3) + sum(fire(*f) for f in fires) + 512 * 100 + 100
    assert num_parameters(squeezenet(100)) == expected == 778_180


@CIFAR
def test_width_scales_parameters_about_quadratically(make):
    ratio = num_parameters(make(10, 0.5)) / num_parameters(make(10, 1.0))
    assert 0.24 < ratio < 0.28


@CIFAR
def test_every_parameter_gets_a_gradient(make):
    torch.manual_seed(0)
    model = make(10, 0.1)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_scaled_rounds_to_the_multiple_and_never_to_nothing():
    assert [scaled(116, w, 2) for w in (1.0, 0.5, 0.25, 0.1, 0.001)] == [116, 58, 28, 12, 2]
    assert scaled(16, 0.1) == 2
    with pytest.raises(ValueError, match="width 0 is not above 0; give a multiplier"):
        scaled(64, 0)


def test_channel_shuffle_interleaves_the_halves():
    x = torch.arange(6).view(1, 6, 1, 1)
    assert channel_shuffle(x).flatten().tolist() == [0, 3, 1, 4, 2, 5]
    torch.testing.assert_close(channel_shuffle(x.float()), nn.ChannelShuffle(2)(x.float()), rtol=0, atol=0)


def test_small_cnn_is_small():
    logits, num_gemms = run_counting_gemms(SmallCNN(), torch.zeros(4, 1, 8, 8))
    assert logits.shape == (4, 10)
    assert num_gemms == 9
    assert num_parameters(SmallCNN()) == 35_642 < 60_000


def expected_parameters(vocab: int, context: int, layers: int, width: int, tied: bool) -> int:
    attention = 4 * width**2 + 4 * width
    feed_forward = 8 * width**2 + 5 * width
    return (
        (1 if tied else 2) * vocab * width
        + context * width
        + layers * (attention + feed_forward + 4 * width)
        + 2 * width
    )


@pytest.mark.parametrize("tied", [False, True])
def test_char_transformer_parameters_match_the_closed_form(tied):
    small = CharTransformer(vocab=50, context=16, layers=3, width=24, heads=3, tied=tied)
    assert num_parameters(small) == expected_parameters(50, 16, 3, 24, tied)
    assert num_parameters(six_layer(tied=tied)) == expected_parameters(97, 128, 6, 128, tied)


def test_char_transformer_calls_four_linear_layers_a_block():
    logits, num_linear = run_counting_gemms(six_layer(), torch.zeros(2, 128, dtype=torch.int64))
    assert logits.shape == (2, 128, 97)
    assert num_linear == 6 * 4 + 1  # attention is a GEMM operator too, but no module


def test_char_transformer_sees_no_future():
    model = CharTransformer(vocab=20, context=12, layers=2, width=16, heads=2)
    codes = torch.randint(20, (1, 12))
    changed = codes.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 20
    with torch.no_grad():
        before, after = model(codes), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=-1).min() > 1e-4


def test_char_transformer_refuses_heads_that_do_not_divide_the_width():
    with pytest.raises(ValueError, match="width 64 is not a multiple of heads 5; choose heads that divide it"):
        CharTransformer(vocab=10, width=64, heads=5)
