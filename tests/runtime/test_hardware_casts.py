"""The GPU's own cast to 8 bits: its codes are the definition's, or rounding stays in integers. Nothing runs on a GPU."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import ptx
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from fxprec.errors import FxprecWarning
from fxprec.numerics import device
from fxprec.numerics.codec import folded_codes
from fxprec.numerics.formats import Format, kept_codes, parse
from fxprec.runtime.gemm import hardware_casts, kernels
from fxprec.runtime.gemm.hardware_casts import casts_in_hardware, probes

GPU = torch.device("cuda:0")
FORMATS = pytest.mark.parametrize("fmt", [parse("e4m3fn"), parse("e5m2_sat")], ids=str)


def instruction(x: Tensor, fmt: Format) -> Tensor:
    """``cvt.rn.satfinite`` as the PTX ISA defines it: to nearest even, the largest number beyond it, NaN is 0x7f."""
    assert fmt.torch_dtype is not None
    largest = torch.finfo(fmt.torch_dtype).max
    code = x.nan_to_num(0.0, largest, -largest).clamp(-largest, largest).to(fmt.torch_dtype).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, code)


def casted(x: Tensor, fmt: Format, keep: bool) -> Tensor:
    """Run the source that kernels get; only its instruction is stood in for."""
    name, source = device.caster_source(fmt, keep=keep)
    cast = {"e4m3fn": "cvt.rn.satfinite.e4m3x2.f32", "e5m2_sat": "cvt.rn.satfinite.e5m2x2.f32"}[fmt.name]

    def asm(text: str, constraints: str, inputs: list[Tensor], *, dtype: object, is_pure: bool, pack: int) -> Tensor:
        assert (constraints, pack, is_pure) == ("=r,f,f,f,f", 4, True)
        packed = ptx.run(text, list(inputs[0].view(-1, 4).t()), {cast: lambda x: instruction(x, fmt).to(torch.int64)})
        return torch.stack([(packed >> shift) & 0xFF for shift in (0, 8, 16, 24)], 1).view(-1)

    tl = SimpleNamespace(uint8=torch.uint8, inline_asm_elementwise=asm)
    names: dict[str, Any] = {"tl": tl, "triton": SimpleNamespace(jit=lambda function: function)}
    exec(source, names)
    short = -len(x) % 4
    found: Tensor = names[name](torch.cat([x, x.new_zeros(short)]))
    return found[: len(x)].to(torch.int32)


@FORMATS
@pytest.mark.parametrize("keep", [True, False])
def test_codes_are_those_of_the_definition(fmt: Format, keep: bool) -> None:
    """NaN's sign is lost by the instruction, and an infinity that is kept becomes the largest number."""
    every_16_bits = (torch.arange(1 << 16, dtype=torch.int64) << 16).to(torch.int32).view(torch.float32)
    x = torch.cat([every_16_bits, probes(fmt)])
    expected = folded_codes(x, fmt, kept_codes(fmt)[0] if keep else None)
    assert torch.equal(casted(x, fmt, keep), expected)
    assert torch.equal(casted(x.flip(0), fmt, keep), expected.flip(0)), "whatever stands beside it"
    plain = instruction(x, fmt).to(torch.int32)
    assert set(x[plain != expected].abs().nan_to_num(-1, torch.inf).tolist()) == ({-1.0, torch.inf} if keep else {-1.0})


def test_kernels_have_the_instruction_where_the_gpu_has_it() -> None:
    for arch, count in ((80, 0), (90, 16)):
        ptx = kernels.cast("e4m3fn", "bf16", "rows", arch, stats=False).compile(arch).asm["ptx"]
        assert ptx.count("cvt.rn.satfinite.e4m3x2.f32") == count, "two of a thread's 32 elements each"


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100")
    monkeypatch.setattr(hardware_casts.compat, "triton_interprets", lambda: False)
    hardware_casts._agrees.cache_clear()
    yield monkeypatch
    hardware_casts._agrees.cache_clear()


def by_definition(x: Tensor, fmt: Format, keep: bool) -> Tensor:
    return folded_codes(x, fmt, kept_codes(fmt)[0] if keep else None).to(torch.uint8)


@FORMATS
def test_a_gpu_that_rounds_otherwise_is_told_and_not_used(h100: pytest.MonkeyPatch, fmt: Format) -> None:
    h100.setattr(Tensor, "to", lambda self, *a, to=Tensor.to: self if a == (GPU,) else to(self, *a))
    h100.setattr(hardware_casts, "_cast", by_definition)
    assert casts_in_hardware(fmt, GPU, keep=True)
    hardware_casts._agrees.cache_clear()
    h100.setattr(hardware_casts, "_cast", lambda x, fmt, keep: by_definition(x * (x != 0.5), fmt, keep))
    words = (
        rf"^{fmt.name}: the cast of NVIDIA H100 gives other codes .*, first for 0.5; rounding is done in integer "
        r"arithmetic"
    )
    with pytest.warns(FxprecWarning, match=words):
        assert not casts_in_hardware(fmt, GPU, keep=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not casts_in_hardware(fmt, GPU, keep=True), "told once"


@FORMATS
def test_the_sign_of_nan_is_no_difference(h100: pytest.MonkeyPatch, fmt: Format) -> None:
    """A GPU multiplies by the scale first, which makes any NaN the positive one. Another code than NaN's is one."""
    h100.setattr(Tensor, "to", lambda self, *a, to=Tensor.to: self if a == (GPU,) else to(self, *a))
    h100.setattr(
        hardware_casts, "_cast", lambda x, fmt, keep: by_definition(x.abs().copysign(x.nan_to_num(1.0)), fmt, keep)
    )
    assert casts_in_hardware(fmt, GPU, keep=True)
    hardware_casts._agrees.cache_clear()
    h100.setattr(
        hardware_casts, "_cast", lambda x, fmt, keep: by_definition(x.nan_to_num(1.0, torch.inf, -torch.inf), fmt, keep)
    )
    with pytest.warns(FxprecWarning, match="first for nan"):
        assert not casts_in_hardware(fmt, GPU, keep=True)


@FORMATS
def test_the_comparison_takes_real_numbers_while_a_graph_compiles(h100: pytest.MonkeyPatch, fmt: Format) -> None:
    """Under a fake mode it would ask fake tensors for codes, which Dynamo takes for a graph it must leave uncompiled."""
    h100.setattr(Tensor, "to", lambda self, *a, to=Tensor.to: self if a == (GPU,) else to(self, *a))
    h100.setattr(hardware_casts, "_cast", by_definition)
    with FakeTensorMode():
        assert casts_in_hardware(fmt, GPU, keep=True)


def test_what_has_no_instruction_is_not_asked(h100: pytest.MonkeyPatch) -> None:
    h100.setattr(hardware_casts, "_cast", None)
    assert not casts_in_hardware(parse("1-4-3+4"), GPU, keep=False)
    assert not casts_in_hardware(parse("e4m3fn"), torch.device("cpu"), keep=False)
    h100.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    assert not casts_in_hardware(parse("e4m3fn"), GPU, keep=False)
