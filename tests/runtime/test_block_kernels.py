"""Compiled kernels of block formats beside the reference: bits, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from block_samples import FORMATS, KINDS, ids, numbers

from fxprec.errors import NativeArgumentError
from fxprec.numerics import block_codec
from fxprec.numerics.blocks import BlockFormat
from fxprec.runtime.cpu import blocks as cpu


def assert_same_numbers(found: torch.Tensor, wanted: torch.Tensor) -> None:
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num().view(bits), wanted.nan_to_num().view(bits))


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_cpu_kernels_give_the_references_bits(fmt: BlockFormat) -> None:
    for kind in KINDS:
        for count, seed in ((3 * fmt.block, None), (5 * fmt.block + 5, 12345), (1, 3), (0, None)):
            x = numbers(kind, count)
            seeds = None if seed is None else torch.tensor([seed], dtype=torch.int32)
            whole = block_codec.tensor_scale(x, fmt) if fmt.tensor_scale else None
            wanted = block_codec.stored(x, seeds, whole, 7, fmt.name)
            found = cpu.store_blocks(x, seeds, whole, 7, fmt.name)
            values = block_codec.loaded(wanted, whole, 7, fmt.name, count, torch.float32)
            known = ~values.isnan().view(-1)[:: fmt.block] if count else torch.zeros(0, dtype=torch.bool)
            assert torch.equal(found[known], wanted[known])  # the codes of a NaN block mean nothing
            for dtype in (torch.float32, torch.bfloat16):
                assert_same_numbers(cpu.load_blocks(found, whole, 7, fmt.name, count, dtype), values.to(dtype))


def test_any_layout_and_dtype_is_read_in_row_major_order() -> None:
    x = torch.randn(6, 10, 40)
    for strided in (x.transpose(0, 2), x[:, ::2, 3:], x.to(torch.bfloat16), x.to(torch.float16).permute(1, 0, 2)):
        wanted = block_codec.stored(strided, None, None, 0, "int4/64:bf16")
        assert torch.equal(cpu.store_blocks(strided, None, None, 0, "int4/64:bf16"), wanted)


def test_what_a_kernel_cannot_walk_is_refused() -> None:
    x = torch.randn(512)
    stored = cpu.store_blocks(x, None, None, 0, "int4")
    for wrong in (stored[:1], stored.view(torch.int8), stored[:, :20], stored.to("meta")):
        with pytest.raises(NativeArgumentError, match="q is "):
            cpu.load_blocks(wrong, None, 0, "int4", 512, torch.float32)
    for wrong in (torch.zeros(1), torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)):
        with pytest.raises(NativeArgumentError, match="seed is "):
            cpu.store_blocks(x, wrong, None, 0, "int4")
    with pytest.raises(NativeArgumentError, match="x is "):
        cpu.store_blocks(x.to("meta"), None, None, 0, "int4")
