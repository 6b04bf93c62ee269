"""Seconds that a launch takes to issue its instructions: its kernel compiled for a GPU that is not there, and counted.

Inductor tries several configurations of a kernel; the one that issues fastest counts.
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.absent import compiled_kernels, pretend
from benchmarks.gpu.roofline.replay import Launch, Memory
from benchmarks.gpu.sass import Code, code_of
from fxprec.runtime.gemm import kernels
from fxprec.runtime.gemm.transpose_kernels import COLUMNS, ROWS


@dataclass(frozen=True)
class Configuration:
    """One configuration of a kernel."""

    code: Code
    blocks: Mapping[str, int]
    """``XBLOCK`` and the like."""

    def cycles(self, sizes: Mapping[str, int]) -> int:
        """Return cycles of all warps of a launch; ``sizes`` are those of `Launch`."""
        if "programs" in sizes:
            return sizes["programs"] * self.code.cycles()
        rows, turns = sizes.get("xnumel", 1), 1
        if "RSPLIT_SIZE" in self.blocks:
            split = self.blocks["RSPLIT_SIZE"]
            programs, turns = math.ceil(rows / split), math.ceil(split / self.blocks["XBLOCK"])
        else:
            programs = math.ceil(rows / self.blocks.get("XBLOCK", 1))
            programs *= math.ceil(sizes.get("ynumel", 1) / self.blocks.get("YBLOCK", 1))
            if "R0_BLOCK" in self.blocks:
                turns = math.ceil(sizes["r0_numel"] / self.blocks["R0_BLOCK"])
        return programs * self.code.cycles(turns)


@dataclass(frozen=True)
class Issue:
    """The kernels of one half's code."""

    arch: int
    kernels: Mapping[str, Sequence[Configuration]]

    @classmethod
    def of(cls, code: str, arch: int) -> Issue:
        """Compile every Triton kernel of Inductor's code."""
        found: dict[str, list[Configuration]] = defaultdict(list)
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            pretend(patch, arch)
            for name, kernel in compiled_kernels(code, Path(folder)):
                found[name].append(Configuration(code_of(kernel), _blocks(kernel)))
        return cls(arch, found)

    def cycles(self, launch: Launch) -> int:
        """Return a launch's cycles; of a library's call 0."""
        configurations = self.kernels.get(launch.kernel)
        if configurations:
            return min(c.cycles(launch.sizes) for c in configurations)
        count = _OWN.get(launch.name.partition(".default")[0])
        return 0 if count is None else count(launch, self.arch)


def _blocks(kernel: Any) -> dict[str, int]:
    names = kernel.src.fn.arg_names
    found = {names[at[0]]: value for at, value in kernel.src.constants.items()}
    return {name: value for name, value in found.items() if isinstance(value, int)}


_FORMATS = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2_sat", torch.uint8: "1-4-3+4", torch.uint16: "1-6-9"}
_SOURCES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@cache
def _cast(source: str, fmt: str, arch: int, row_major: bool, stats: bool) -> Code:
    return code_of(kernels.cast(fmt, source, "rows", arch, row_major=row_major, stats=stats).compile(arch))


@cache
def _transposition(arch: int) -> Code:
    return code_of(kernels.transposition().compile(arch))


def _tiles(x: Memory) -> int:
    return math.ceil(math.prod(x.shape[:-1]) / ROWS) * math.ceil(x.shape[-1] / COLUMNS)


def _of_cast(launch: Launch, arch: int) -> int:
    source, (codes, turned, counts) = launch.inputs[0], launch.outputs
    wanted = {"row_major": codes.elements > 0, "stats": counts.elements > 0}
    code = _cast(_SOURCES[source.dtype], _FORMATS[turned.dtype], arch, **wanted)
    return _tiles(source) * code.cycles()


def _of_transposition(launch: Launch, arch: int) -> int:
    return _tiles(launch.inputs[0]) * _transposition(arch).cycles()


_OWN: Mapping[str, Callable[[Launch, int], int]] = {
    "fxprec.quantize_transpose": _of_cast,
    "fxprec.transpose_codes": _of_transposition,
}
