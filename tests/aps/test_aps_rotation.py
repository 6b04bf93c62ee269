"""The rotation of blocks: against the matrix itself, kernel and plain form alike, and what 4 bits lose with and without."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from aps_reference import times_hadamard
from torch import Tensor

from fxprec.errors import FormatError
from fxprec.runtime.aps import kernels
from fxprec.runtime.aps.layout import layout
from fxprec.runtime.aps.rotation import rotate, rotate_back, signs_of
from fxprec.runtime.aps.wire import num_bytes, wire_of

BLOCKS = (8, 32, 256, 4096)


def values(block: int, count: int = 12) -> Tensor:
    return torch.randn(block * count, generator=torch.Generator().manual_seed(0))


def rotated(x: Tensor, signs: Tensor) -> Tensor:
    y = x.clone()
    rotate(y, signs)
    return y


@pytest.mark.parametrize("block", BLOCKS)
def test_the_kernel_gives_the_bits_of_the_plain_form_and_of_the_definition(block: int) -> None:
    x, signs = values(block), signs_of(5, block, torch.device("cpu"))
    found = rotated(x, signs)
    with mock.patch.object(kernels, "usable", return_value=False):
        assert torch.equal(rotated(x, signs), found)
    factor = np.float32(2.0 ** -np.ceil(np.log2(block) / 2))
    wanted = times_hadamard(x.view(-1, block).numpy() * (signs.numpy() * factor))
    np.testing.assert_array_equal(found.view(-1, block).numpy(), wanted)


@pytest.mark.parametrize("block", BLOCKS)
def test_rotated_back_it_is_the_gradient_again(block: int) -> None:
    x, signs = values(block), signs_of(6, block, torch.device("cpu"))
    y = rotated(x, signs)
    rotate_back(y, signs)
    assert (y - x).abs().max() < 1e-5
    assert not torch.equal(rotated(x, signs_of(7, block, torch.device("cpu"))), rotated(x, signs))


def test_one_large_gradient_costs_the_others_little_only_after_the_rotation() -> None:
    wire, signs = wire_of("1-2-1/256:e8m0"), signs_of(1, 256, torch.device("cpu"))
    x = values(256, 64)
    x[::256] = 100

    def lost(rotates: bool) -> float:
        y = rotated(x, signs) if rotates else x.clone()
        y = wire.decode(wire.encode(y))
        if rotates:
            rotate_back(y, signs)
        small = torch.arange(x.numel()) % 256 != 0
        return float((y - x)[small].square().sum() / x[small].square().sum())

    assert lost(rotates=False) > 0.99, "all others are rounded to 0"
    assert lost(rotates=True) < 0.6


def test_what_four_bits_lose_of_normal_gradients_is_the_share_that_the_planner_counts() -> None:
    wire, x = wire_of("1-2-1/256:e8m0"), values(256, 4096)
    assert float((wire.decode(wire.encode(x)) - x).square().sum() / x.square().sum()) == pytest.approx(0.0128, rel=0.02)


def test_stochastic_blocks_are_unbiased() -> None:
    wire, x, g = wire_of("1-2-1/256:e8m0"), values(256, 2), torch.Generator().manual_seed(3)
    mean = sum(wire.decode(wire.encode(x, generator=g)).double() for _ in range(2000)) / 2000
    assert float((mean - x).norm() / x.norm()) < 0.006
    assert float((wire.decode(wire.encode(x)) - x).norm() / x.norm()) > 0.1


def test_layers_and_chunks_begin_at_whole_blocks() -> None:
    for sizes in ((700, 0, 1, 256), (1,), (5000, 100, 3)):
        for ranks in (1, 3, 4):
            lay = layout(sizes, ranks, 256)
            assert all(start % 256 == 0 for start, _ in lay.bounds)
            assert lay.chunk % 256 == 0
            assert [i for p in lay.pieces for i in range(p.start, p.end)] == list(range(lay.total))
            assert [v.numel() for v in lay.layers(torch.zeros(lay.total))] == list(sizes)
    assert num_bytes(wire_of("1-2-1/256:e8m0"), 512) == 2 * 129


def test_what_blocks_cannot_do_is_refused_with_the_way_out() -> None:
    with pytest.raises(FormatError, match="use a block format without"):
        wire_of("nvfp4")
    with pytest.raises(FormatError, match="not in blocks of 256"):
        rotate(torch.zeros(100), signs_of(0, 256, torch.device("cpu")))
