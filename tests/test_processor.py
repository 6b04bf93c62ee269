"""The processor is data: what torch says of this one, or what the option ``cpu`` names."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processors import AT_HAND
from torch import nn

import fxprec
from fxprec.config import Settings
from fxprec.config.processor import GEMMS, MOST_THREADS, VECTORS, Processor

DTYPES = st.sets(st.sampled_from(list(GEMMS.values())))

CPUINFO = Path("/proc/cpuinfo")


@given(st.sampled_from(VECTORS), DTYPES, st.integers(1, MOST_THREADS))
def test_its_text_names_it(vectors: str, gemms: set[torch.dtype], threads: int) -> None:
    processor = Processor(vectors, frozenset(gemms), threads)
    assert Processor.parse(str(processor)) == processor


@pytest.mark.parametrize(
    ("cpu", "words"),
    [
        (
            "avx521",
            r"cpu is 'avx521', and 'avx521' is none of default, avx2, .*; did you mean 'avx512'\?; give an instruc",
        ),
        ("avx512+fp8", r"'fp8' is none of bf16, fp16; give an"),
        ("", r"cpu is '', and '' is none of"),
        ("avx2:", r"cpu has '' for its threads; give a number from 1 to 4096, such as 'avx2'"),
        ("avx2:0", r"cpu has '0' for its threads"),
        ("avx2:99999999999999999999", r"cpu has '9+' for its threads"),
        ("avx2:\u0664", r"for its threads"),
        (512, r"cpu is 512; give it a string such as 'avx2', 'avx512\+bf16' or, .*, or None"),
    ],
)
def test_a_wrong_one_is_an_error(cpu: object, words: str) -> None:
    with pytest.raises(fxprec.ConfigError, match=words):
        fxprec.Config(cpu=cpu)


def test_settings_have_the_one_asked_for_or_the_one_at_hand() -> None:
    assert Settings.of(fxprec.Config(cpu="avx2")).processor == Processor("avx2")
    assert Settings.of(fxprec.Config()).processor == Processor.here()


@pytest.mark.cpu_dependent
def test_the_one_at_hand_is_the_one_torch_uses() -> None:
    assert Processor.here() == AT_HAND
    assert AT_HAND.vectors.upper() == torch.backends.cpu.get_cpu_capability()
    flags = set(CPUINFO.read_text(encoding="utf-8").split()) if CPUINFO.exists() else set()
    is_emulated = "avx512f" in flags and "avx512_bf16" not in flags  # oneDNN takes bf16, and is slower than in float32
    assert (torch.bfloat16 in AT_HAND.gemms) == (torch.ops.mkldnn._is_mkldnn_bf16_supported() and not is_emulated)


@pytest.mark.cpu_dependent
def test_it_follows_the_variables_that_hold_a_cpu_back() -> None:
    """So one machine stands for both kinds; see `./dev avx2`."""
    ask = "from fxprec.config.processor import Processor; print(Processor.here())"
    held = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-W", "ignore", "-c", ask]
    run = subprocess.run(command, env={**os.environ, **held}, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["avx2"]


def test_a_plan_follows_the_threads_of_its_processor_and_not_those_at_hand(request: pytest.FixtureRequest) -> None:
    """In each, a GEMM packs panels of its own."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))

    def planned(cpu: str, at_hand: int) -> int:
        torch.compiler.reset()
        torch.set_num_threads(at_hand)
        backend = fxprec.Backend(fxprec.Config(recipe="fp8", lowering="eager", peak_budget="95%", cpu=cpu))
        model = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 32))
        torch.compile(model, backend=backend)(torch.randn(256, 32)).sum().backward()
        peak = backend.plans[0].peak_bytes
        assert peak is not None
        return peak.high

    one, four = (planned(cpu, 1) for cpu in ("avx512+bf16", "avx512+bf16:4"))
    assert one < four
    assert (planned("avx512+bf16", 2), planned("avx512+bf16:4", 2)) == (one, four)


@pytest.mark.cpu_dependent
@pytest.mark.parametrize("cpu", ["avx2", "avx512+bf16", "avx512+bf16+fp16"])
def test_a_plan_for_a_processor_is_the_same_on_every_machine(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch says of the one at hand."""
    texts = []
    for at_hand in ("avx2", "avx512+bf16"):
        torch.compiler.reset()
        torch.manual_seed(0)
        monkeypatch.setattr(Processor, "here", lambda text=at_hand: Processor.parse(text))
        backend = fxprec.Backend(fxprec.Config(recipe="fp8", lowering="eager", peak_budget="95%", cpu=cpu))
        model = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 32))
        torch.compile(model, backend=backend)(torch.randn(256, 32)).sum().backward()
        texts.append(repr(backend.plans[0]))
    assert texts[0] == texts[1]
