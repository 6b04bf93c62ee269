"""Row 5: what statistics and scales cost: the fp8 step with them and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import fxprec
import fxprec.driver.half_compilation
from benchmarks.gpu.models import LLAMA_BLOCK, TINY, Decoder
from benchmarks.gpu.suite import Row, Setting
from benchmarks.gpu.timing import in_turn
from fxprec.passes.lowering.rows import WatchedRows

WANTED = 0.02


def statistics_cost(setting: Setting) -> Iterator[Row]:
    """Yield the share of the step's forward and backward."""
    shape, tokens = (TINY, 64) if setting.tiny else (LLAMA_BLOCK, 8192)
    x = torch.randn(2, tokens // 2, shape.width, device=setting.device)
    sides = {}
    for name in ("with", "without"):
        torch.manual_seed(0)
        network = Decoder(shape).to(setting.device)
        scaled = name == "with"
        config = fxprec.Config(
            recipe="fp8",
            low_ratio=1.0,
            lowering="auto" if setting.compiles else "eager",
            promote_above=0.01 if scaled else None,
            grad_scaling="auto" if scaled else "none",
        )
        torch.compiler.reset()
        compiled = torch.compile(network, backend=fxprec.Backend(config))

        def run(compiled: Any = compiled, network: Any = network) -> None:
            compiled(x).square().mean().backward()
            network.zero_grad(set_to_none=True)

        with mock.patch.object(
            fxprec.driver.half_compilation,
            "lower",
            _lower_without(fxprec.driver.half_compilation.lower)
            if not scaled
            else fxprec.driver.half_compilation.lower,
        ):
            run()  # compiles both halves
        sides[name] = run
    took = in_turn(sides, setting.device, repeats=2 * setting.repeats)
    share = took["with"] / took["without"] - 1
    yield Row("statistics", "statistics and scales, share of step", share, "", f"<= {WANTED}", share <= WANTED, took)


def _lower_without(lower: Any) -> Any:
    """Lower with no row watched, measured or counted."""

    def without(gm: Any, lowering: str, device_type: str, rows: WatchedRows, **options: Any) -> Any:
        return lower(gm, lowering, device_type, WatchedRows(scaled=rows.scaled), **options)

    return without
