"""What Inductor's loops on a CPU read, write and hand on, of a small convolutional network held in 8 bits."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

pytestmark = pytest.mark.inductor


class Compiled(NamedTuple):
    model: nn.Module
    saved: list[Tensor]
    codes: list[str]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    torch.manual_seed(0)
    torch.compiler.reset()
    first, second, third = (nn.Conv2d(channels, 32, 3, bias=False) for channels in (16, 32, 32))
    model = nn.Sequential(first, nn.BatchNorm2d(32), nn.GELU(), second, nn.ReLU(), third)
    step = torch.compile(model, backend="fxprec", options={"recipe": "fp8", "low_ratio": 1.0})
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    def run() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = step(torch.randn(4, 16, 12, 12))
        out.square().mean().backward()

    with torch._inductor.config.patch(fx_graph_cache=False):
        _, codes = run_and_get_code(run)
    return Compiled(model, saved, codes)


def test_weights_are_handed_to_backward_themselves(compiled: Compiled) -> None:
    weights = {p.data_ptr() for p in compiled.model.parameters() if p.ndim == 4}
    assert {t.data_ptr() for t in compiled.saved if t.ndim == 4 and t.dtype == torch.float32 and len(t) > 1} == weights


def test_codes_are_written_once_and_as_they_lie_in_memory(compiled: Compiled) -> None:
    stored = [t for t in compiled.saved if t.dtype == torch.float8_e4m3fn]
    assert [t.shape for t in stored] == [(4, 16, 12, 12), (4, 32, 10, 10), (4, 32, 8, 8)]  # input, convolution, ReLU
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in stored)
    assert "torch.uint8" not in compiled.codes[0]  # a buffer of codes to be copied into another layout


def test_bits_are_read_vector_by_vector(compiled: Compiled) -> None:
    assert len(compiled.codes) == 2
    for code in compiled.codes:
        assert "std::memcpy(&bits" in code
        assert "tmpbuf_out[i]" not in code
