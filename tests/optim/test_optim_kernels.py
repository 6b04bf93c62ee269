"""The generated kernels against the plain reference, bit for bit: C++ here, Triton in its interpreter and as PTX."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from interpreted import interpreted
from optim.rules import RULES, numbers_of, row_of, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

from fxprec.errors import ConfigError
from fxprec.runtime import on_device
from fxprec.runtime.optim import cpp, reference
from fxprec.runtime.optim.fma import fma, sqrt
from fxprec.runtime.optim.rule import Rule

SIZES = (20_011, 0, 7, 1)


def _name(rule: Rule) -> str:
    return f"{rule.algorithm}-{rule.update}-{rule.format}-{rule.states}"


def check_kernel(rule: Rule, run, sizes: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    """Run a kernel over parameters of all sizes at once, and the reference over each."""
    rows = [row_of(rule, n, seed) for seed, n in enumerate(sizes)]
    wanted = [[t.clone() for t in row] for row in rows]
    scalars, integers = numbers_of(rule, len(rows))
    counts = torch.zeros(len(rows), 2, dtype=torch.int64)
    assert run(rule, rows, scalars, integers, counts) is not False, "it compiles"
    for i, (row, expected) in enumerate(zip(rows, wanted, strict=True)):
        count = torch.zeros(2, dtype=torch.int64)
        reference.run(rule, expected, scalars[i], integers[i], count)
        for name, found, right in zip((*rule.tensors, *rule.scales), row, expected, strict=True):
            assert same_bits(found, right), (name, sizes[i])
        assert counts[i].tolist() == count.tolist()
    assert not rule.statistics or int(counts[0, 0]) > sizes[0] // 2  # updates there were


@pytest.mark.parametrize("rule", RULES, ids=_name)
def test_the_cpu_kernel_gives_the_bits_of_the_reference(rule: Rule) -> None:
    check_kernel(rule, cpp.run, SIZES)


def test_fused_multiply_add_rounds_once() -> None:
    """Against exact fractions: no float32 is nearer, and ties are even."""
    g = torch.Generator().manual_seed(0)
    a, b = ((torch.randint(1 << 23, 1 << 24, (2, 1500), generator=g)).float() * 2.0**-23).unbind()
    exponent = torch.randint(-60, 60, (1500,), generator=g)
    # Every third addend makes the sum of the leading parts a tie, which the product's tail breaks.
    c = torch.where(torch.arange(1500) % 3 == 0, 2.0**24 + 2, torch.ldexp(-(a * b).float(), exponent // 20))
    for x, y, z, found in zip(a, b, c, fma(a, b, c), strict=True):
        exact = Fraction(x.item()) * Fraction(y.item()) + Fraction(z.item())
        error = abs(Fraction(found.item()) - exact)
        for side in (-torch.inf, torch.inf):
            other = torch.nextafter(found, torch.tensor(side))
            distance = abs(Fraction(other.item()) - exact)
            even = int(found.view(torch.int32)) % 2 == 0
            assert error < distance or (error == distance and even)
    assert torch.isnan(fma(torch.tensor([torch.inf]), torch.zeros(1), torch.ones(1))).item()


def test_square_roots_are_rounded_once() -> None:
    x = torch.rand(100_000) * 10 ** (torch.rand(100_000) * 30 - 20)
    assert np.array_equal(sqrt(x).numpy(), np.sqrt(x.numpy()))


class Launches:
    """Stands for the Triton kernel."""

    def __init__(self) -> None:
        self.programs: list[int] = []

    def __getitem__(self, grid: tuple[int]) -> object:
        self.programs.append(grid[0])
        return lambda *args, **options: None


def test_three_steps_upload_the_addresses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of one entry for 1,024 elements was made in Python and uploaded, from pageable memory, in every step."""
    pytest.importorskip("triton")
    from fxprec.runtime.optim import triton_step

    uploads: list[int] = []

    def upload(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        uploads.append(x.numel())
        return x

    launches = Launches()
    monkeypatch.setattr(triton_step.on_device, "upload", upload)
    monkeypatch.setattr(triton_step, "kernel", lambda rule: launches)
    triton_step._table.cache_clear()
    rows = [row_of(RULES[0], n) for n in (1 << 22, 0, 7, 16)]
    scalars, integers = numbers_of(RULES[0], len(rows))
    for _ in range(3):
        triton_step.run(RULES[0], rows, scalars, integers, None)
    triton_step._table.cache_clear()
    entry = 3 + len(RULES[0].tensors)
    numbers = [scalars.numel(), integers.numel()]
    assert uploads == [*numbers, 2 * entry, entry, *numbers * 2]
    assert launches.programs == [(1 << 12) + 1, 1] * 3, "those of 2^22 and of 16 elements, and the one of 7"


def test_uploads_are_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[bool, object]] = []
    pinned = torch.ones(2)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, device, **options: copied.append((self is pinned, options)) or self
    )
    on_device.upload(torch.zeros(2), torch.device("cuda"))
    assert copied == [(True, {"non_blocking": True})]


def test_a_step_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from fxprec.runtime.optim import triton_step

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        row = [torch.empty(4, device="cuda") for _ in range(2)]
    with pytest.raises(ConfigError, match=r"^step\(\) runs in the capture of a CUDA graph.*; call it outside of"):
        triton_step.run(RULES[0], [row], torch.zeros(1, 1), torch.zeros(1, 3), None)


@interpreted
@pytest.mark.parametrize("rule", RULES, ids=_name)
def test_triton_kernels_give_the_bits_of_the_reference(rule: Rule) -> None:
    from fxprec.runtime.optim import triton_step

    with np.errstate(all="ignore"):  # the interpreter is NumPy, which warns of inf and NaN
        check_kernel(rule, triton_step.run, (3_008, 7, 0, 5, 0))


@pytest.mark.parametrize("arch", [80, 90, *(pytest.param(arch, marks=pytest.mark.full) for arch in (89, 100))])
def test_triton_kernels_compile_for_every_architecture(arch: int) -> None:
    pytest.importorskip("triton")
    from fxprec.runtime.optim.triton_source import compiled

    text = compiled(RULES[5], arch).asm["ptx"]
    assert "fma.rn.f32" in text
    assert "sqrt.rn.f32" in text
    assert "div.full" not in text


def test_codes_in_blocks_compile_for_a_gpu() -> None:
    """With 16 bytes at a time: of 1,024 elements each of 128 threads has 8, which are 8 bytes of codes."""
    pytest.importorskip("triton")
    from fxprec.runtime.optim.triton_source import compiled

    rule = RULES[9]
    assert (rule.states, rule.carrier) == ("8bit", torch.bfloat16)
    found = accesses(compiled(rule, 90).asm["ptx"])
    codes = len(rule.coded)
    assert found["ld.global.v2.b32"] == found["st.global.v2.b32"] == codes
    assert found["ld.global.v4.b32"] == 2
    assert found["st.global.v4.b32"] == 1


def accesses(text: str) -> Counter[str]:
    """Return how often PTX has each access of global memory."""
    return Counter(re.findall(r"(?:ld|st)\.global(?:\.v\d)?\.b\d+", text))


def test_aligned_parameters_are_read_and_written_16_bytes_at_a_time() -> None:
    pytest.importorskip("triton")
    from fxprec.runtime.optim.triton_source import compiled

    rule = RULES[5]
    assert rule.carrier is torch.bfloat16
    narrow, wide = (accesses(compiled(rule, 90, is_aligned=aligned).asm["ptx"]) for aligned in (False, True))
    reads, writes = len(rule.tensors), narrow["st.global.b16"] // 8  # 1,024 elements, 128 threads: 8 a thread
    assert narrow["ld.global.b16"] == 8 * reads
    assert (wide["ld.global.v4.b32"], wide["st.global.v4.b32"]) == (reads, writes)
    assert not {"ld.global.b16", "st.global.b16"} & wide.keys()


@interpreted
def test_a_parameter_that_is_not_aligned_is_stepped_beside_those_that_are() -> None:
    from fxprec.runtime.optim import triton_step

    rule = RULES[0]
    rows = [row_of(rule, n) for n in (32, 40, 48)]
    rows[2] = [t.new_empty(49)[1:].copy_(t) for t in rows[2]]
    aligned, others = triton_step._parts(rows)
    assert [[entry[2] for entry in part] for part in (aligned, others)] == [[0], [1, 2]]
    assert [entry[0] for entry in others] == [0, 1]
