"""MS-EDEN: half of the error of rounding at random, and no bias over turns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fxprec
from fxprec.numerics import block_codec
from fxprec.numerics.blocks import NVFP4
from fxprec.numerics.eden import HEADROOM, corrected
from fxprec.numerics.hadamard import rotated

DRAWS, SIZE = 10_000, 128


def rounded(x: Tensor, seed: Tensor, size: int = SIZE) -> Tensor:
    """Round ``x`` to NVFP4 to nearest, and correct its scales."""
    whole = block_codec.tensor_scale(x, NVFP4) * HEADROOM
    q = block_codec.stored(x, None, whole, -2, NVFP4.name)
    q = corrected(q, x, whole, seed, -2, NVFP4.name, size)
    return block_codec.loaded(q, whole, -1, NVFP4.name, x.numel(), torch.float32).view(x.shape)


def seed(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32)


def normal(n: int, value: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(value))


@pytest.mark.parametrize("size", [16, 128])
def test_the_error_of_normal_numbers_is_less_than_half_of_that_of_rounding_at_random(size: int) -> None:
    x = normal(1 << 18)
    at_random = fxprec.quantize(x, NVFP4, rounding="stochastic", generator=torch.Generator().manual_seed(1))
    error, other = ((y - x).square().mean() for y in (rounded(x, seed(1), size), at_random))
    assert other > 2.2 * error, (error, other)


def test_only_scales_are_random_and_a_vector_keeps_its_projection() -> None:
    x = normal(1 << 14).view(-1, SIZE)
    whole = block_codec.tensor_scale(x, NVFP4) * HEADROOM
    q = block_codec.stored(x, None, whole, -2, NVFP4.name)
    one, same, other = (corrected(q, x, whole, seed(i), -2, NVFP4.name, SIZE) for i in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(one[:, 1:], q[:, 1:]), "codes of elements"
    kept = torch.stack([(rounded(x, seed(i)) * x).sum(1) / x.square().sum(1) - 1 for i in range(100)])
    z = kept.mean(0) / kept.std(0) * 10
    assert float(z.square().mean()) < 1 + 3 * (2 / len(x)) ** 0.5, "of each vector"
    plain = (block_codec.loaded(q, whole, -1, NVFP4.name, x.numel(), torch.float32).view(x.shape) * x).sum(1)
    assert float((plain / x.square().sum(1) - 1).mean()) < -0.005, "nearest loses, which is what the factor is for"


def test_zeros_nan_and_huge_numbers() -> None:
    zeros = torch.zeros(SIZE)
    assert torch.equal(rounded(zeros, seed(1)), zeros)
    x = normal(2 * SIZE)
    x[3] = torch.nan
    assert rounded(x, seed(1))[:16].isnan().all()
    x = normal(SIZE)
    for factor in (2.0**120, 2.0**-80):
        assert torch.equal(rounded(x * factor, seed(1)), rounded(x, seed(1)) * factor)


def test_no_scale_saturates() -> None:
    """The tensor's largest block has the largest scale, which the factor may raise."""
    x = normal(SIZE)
    whole = block_codec.tensor_scale(x, NVFP4) * HEADROOM
    q = block_codec.stored(x, None, whole, -2, NVFP4.name)
    largest = q[:, 0].view(torch.float8_e4m3fn).float().max()
    assert largest == 256
    assert (
        corrected(q, 1.5 * x, whole, seed(1), -2, NVFP4.name, SIZE)[:, 0].view(torch.float8_e4m3fn).float().max() >= 352
    )


def test_the_mean_over_10000_turns_is_the_vector() -> None:
    x, drawn = normal(SIZE), seed(5)
    # A turn of its own for each draw: random signs in front of one matrix with random signs.
    signs = torch.sign(normal(DRAWS * SIZE, 1)).view(DRAWS, SIZE)
    found = rounded(rotated(x * signs, drawn, SIZE), drawn)
    errors = (found @ rotated(torch.eye(SIZE), drawn, SIZE).mT * signs - x).double()
    for direction in (x, torch.sign(x)):
        along = errors @ direction.double()
        assert abs(float(along.mean())) < 3 * float(along.std()) / DRAWS**0.5
    # Each element by itself: the mean of 128 squares of standard normal numbers.
    z = errors.mean(0) / errors.std(0) * DRAWS**0.5
    assert float(z.square().mean()) < 1 + 3 * (2 / SIZE) ** 0.5
