"""Block formats as torchao has them: codes, scales and numbers bit for bit. Skipped where torchao is not installed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fxprec
from fxprec.numerics.blocks import find_blocks

mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is the oracle")
nvfp4_tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao is the oracle")

ELEMENTS = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp4": torch.float4_e2m1fn_x2,
}
ROWS, COLUMNS = 64, 256


def numbers(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    match kind:
        case "normal":
            return x
        case "bf16":
            return x.to(torch.bfloat16)
        case "wide":  # over 60 binades, each block in its own
            return x * torch.exp2(torch.randint(-30, 30, (ROWS, COLUMNS // 32, 1), generator=generator).float()).expand(
                ROWS, COLUMNS // 32, 32
            ).reshape(ROWS, COLUMNS)
        case "ties":
            return torch.randint(-64, 65, (ROWS, COLUMNS), generator=generator).float() / 8
        case "sparse":
            return torch.where(x.abs() > 2, x, 0.0)
    raise AssertionError(kind)


KINDS = ["normal", "bf16", "wide", "ties", "sparse"]


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_mx(name: str, kind: str) -> None:
    x = numbers(kind)
    scales, codes = mx_tensor.to_mx(x, ELEMENTS[name], 32)
    found = fxprec.encode(x, name)
    assert torch.equal(found.scales.view(torch.uint8), scales.view(torch.uint8).reshape(-1))
    assert torch.equal(found.codes, codes.view(torch.uint8).reshape(-1))
    decoded = mx_tensor.to_dtype(codes, scales, ELEMENTS[name], 32, torch.float32)
    assert torch.equal(fxprec.decode(found, name), decoded.view(ROWS, COLUMNS))


@pytest.mark.parametrize("kind", KINDS)
def test_mx_with_scales_rounded_up(kind: str) -> None:
    """As cuBLAS and TransformerEngine choose them, which torchao calls RCEIL."""
    x, name = numbers(kind), "e4m3fn/32:e8m0up"
    scales, codes = mx_tensor.to_mx(x, torch.float8_e4m3fn, 32, mx_tensor.ScaleCalculationMode.RCEIL)
    found = fxprec.encode(x, name)
    known = scales.view(torch.uint8).reshape(-1) > 0  # blocks of 0, whose scale says nothing
    assert torch.equal(found.scales.view(torch.uint8)[known], scales.view(torch.uint8).reshape(-1)[known])
    assert torch.equal(found.codes, codes.view(torch.uint8).reshape(-1))


@pytest.mark.parametrize("kind", ["normal", "bf16", "ties"])
def test_nvfp4(kind: str) -> None:
    """Without blocks below 2^-6 of the largest scale, where torchao keeps scales normal and ours become subnormal."""
    x = numbers(kind)
    whole = nvfp4_tensor.per_tensor_amax_to_scale(x.float().abs().max())
    scales, codes = nvfp4_tensor.nvfp4_quantize(x, 16, whole)
    found = fxprec.encode(x, "nvfp4")
    assert torch.equal(found.tensor_scale, whole.view(1))
    assert torch.equal(found.scales.view(torch.uint8), scales.view(torch.uint8).reshape(-1))
    assert torch.equal(found.codes, codes.view(torch.uint8).reshape(-1))


def test_a_square_is_a_block_of_torchaos_with_one_scale() -> None:
    """Each square of a weight has the scale that torchao gives a block of the square's largest magnitude."""
    generator = torch.Generator().manual_seed(4)
    squares = torch.randn(8, 256, generator=generator)
    fmt = find_blocks("1-2-1/256:e4m3fn*")
    whole = nvfp4_tensor.per_tensor_amax_to_scale(squares.abs().max())
    largest = squares.abs().amax(1, keepdim=True).expand(8, 16).contiguous()
    scales, _ = nvfp4_tensor.nvfp4_quantize(largest, 16, whole)
    found = fxprec.encode(squares, fmt)
    assert torch.equal(found.scales.view(torch.uint8), scales.view(torch.uint8).reshape(-1))
