"""Faults to plant into fxprec: each a function that returns patches of the real code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fxprec.driver.named  # noqa: F401  in the right order
from fxprec.config.recipes import Recipe
from fxprec.numerics import codec, directed
from fxprec.numerics.formats import parse
from fxprec.numerics.rows import FormatRow, as_float, format_row
from fxprec.passes.analysis import assignment, groups
from fxprec.passes.analysis.policies import POLICIES, Choice
from fxprec.passes.casts import simulated as casts_simulated
from fxprec.runtime import reference_ops, table
from fxprec.runtime.controller import Controller
from fxprec.runtime.scaling import keeper as scaling

SIMULATED = {"recipe": "hfp8", "low_ratio": 0.6}
PACKED = {"recipe": "hfp8", "low_ratio": 0.6, "storage": "packed"}
KEPT = {"recipe": "hfp8", "low_ratio": 0.6, "keep_high": ("down",)}
Patches = Mapping[tuple[Any, str], Any]


@dataclass(frozen=True)
class Fault:
    """One fault, under the options it is planted with. ``loud``: the block's values overflow its low format."""

    what: str
    patches: Callable[[], Patches]
    options: Mapping[str, Any] = ()  # type: ignore[assignment]
    loud: bool = False

    @contextmanager
    def planted(self) -> Any:
        with ExitStack() as stack:
            for (owner, name), value in self.patches().items():
                stack.enter_context(mock.patch.object(owner, name, value))
            yield


def _rounding(change: Callable[[Tensor, FormatRow], Tensor]) -> Callable[[], Patches]:
    """Round simulated values by ``change(x, row)``; formats as wide as float32 stay."""
    return lambda: {(reference_ops, "_rounded"): change}


def _toward_zero(x: Tensor, row: FormatRow[Any]) -> Tensor:
    return directed.truncated(x, row)


def _ties_away(x: Tensor, row: FormatRow[Any]) -> Tensor:
    return codec.nearest(torch.nextafter(x, torch.copysign(torch.tensor(torch.inf), x)), row)


def _stochastic(x: Tensor, row: FormatRow[Any]) -> Tensor:
    return directed.dithered(x, torch.randint(1 << 31, x.shape, dtype=torch.int32), row)


def _flushed(x: Tensor, row: FormatRow[Any]) -> Tensor:
    return torch.where(x.abs() < as_float(row.min_normal), 0.0, codec.nearest(x, row))


def _twice(x: Tensor, row: FormatRow[Any]) -> Tensor:
    return codec.nearest(x.to(torch.bfloat16).to(x.dtype), row)


def _one_site_unrounded() -> Patches:
    wide, low = format_row(parse("fp32")), format_row(parse("1-4-3+4"))

    def rounded(x: Tensor, row: FormatRow[Any]) -> Tensor:
        is_low_output = row[1:] == low[1:] and x.shape == (64, 32)
        return codec.nearest(x, wide if is_low_output else row)

    return {(reference_ops, "_rounded"): rounded}


def _codes_toward_zero() -> Patches:
    real = reference_ops.reference_encode

    def encode(x: Tensor, fmt: Any) -> Tensor:
        down = directed.truncated(x.float(), format_row(parse(fmt)))
        return real(down, fmt)

    return {(reference_ops, "reference_encode"): encode}


def _subnormal_codes_are_zero() -> Patches:
    real = reference_ops.reference_decode

    def decode(codes: Tensor, fmt: Any, *rest: Any) -> Tensor:
        found = real(codes, fmt, *rest)
        return torch.where(found.abs() < parse(fmt).smallest_normal, 0.0, found)

    return {(reference_ops, "reference_decode"): decode}


def _swapped_formats() -> Patches:
    real = Recipe.format_of
    other = {"output": "grad_output", "grad_output": "output", "param": "grad_output", "grad_param": "grad_param"}
    return {(Recipe, "format_of"): lambda self, kind, *, low: real(self, other[kind], low=low)}


def _table_row(name: str, instead: str) -> Callable[[], Patches]:
    real = table.format_row
    return lambda: {(table, "format_row"): lambda fmt: real(parse(instead) if fmt.name == name else fmt)}


def _lost_scale() -> Patches:
    return {(reference_ops, "_scale_exp"): lambda table, row: 0}


def _never_refreshed() -> Patches:
    return {(scaling.ScaleKeeper, "update"): lambda self, step, tell: None}


def _solved_low() -> Patches:
    real = scaling.solve

    def solve(*args: Any) -> Any:
        found = real(*args)
        return replace(found, exps=[exp - 2 for exp in found.exps])

    return {(scaling, "solve"): solve}


def _gradients(change: Callable[[Tensor], Tensor]) -> Callable[[], Patches]:
    """Change every low gradient as it is rounded."""
    low = format_row(parse("1-5-2"))

    def rounded(x: Tensor, row: FormatRow[Any]) -> Tensor:
        found = codec.nearest(x, row)
        return change(found) if row[1:] == low[1:] else found

    return lambda: {(reference_ops, "_rounded"): rounded}


def _noise(x: Tensor) -> Tensor:
    return x * (1 + 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))


def _left_high() -> Patches:
    real = casts_simulated._round_values

    def without_one(grouped: Any, book: Any) -> None:
        kept = {n: t for n, t in grouped.values.items() if not (t.kind == "output" and "relu" in t.name)}
        real(replace(grouped, values=kept), book)

    return {(casts_simulated, "_round_values"): without_one}


def _grouping_off_by_one() -> Patches:
    real = groups._Walk._count_value

    def count(self: Any, node: Any, group: int, op: Any) -> None:
        real(self, node, group - 1 if op is not None and op.is_gemm else group, op)

    return {(groups._Walk, "_count_value"): count}


def _one_group_too_few() -> Patches:
    def policy(problem: Any) -> Choice:
        choice = POLICIES["size"](problem)
        last = [g for g in choice.order if problem.groups[g] and problem.groups[g][0].id in choice.low][-1]
        return replace(choice, low=choice.low - {t.id for t in problem.groups[last]})

    return {(assignment, "POLICIES"): {**POLICIES, "size": policy}}


def _weight_gradients_low() -> Patches:
    def format_of(self: Recipe, kind: str, *, low: bool) -> Any:
        gradient = kind.startswith("grad")
        return (self.lo_backward if gradient else self.lo_forward) if low or kind == "grad_param" else self.hi

    return {(Recipe, "format_of"): format_of}


def _keep_high_ignored() -> Patches:
    return {(assignment, "kept_high"): lambda tensors, keep_high, ends=None: (frozenset(), [])}


def _never_promoted() -> Patches:
    return {(Controller, "_overflows"): lambda self, site, stats, step: False}


def _overflow_at_twice() -> Patches:
    real = reference_ops.reference_stats
    return {(reference_ops, "reference_stats"): lambda x, grid: real(x, grid._replace(largest=2 * grid.largest))}


FAULTS = (
    Fault("rounds toward zero", _rounding(_toward_zero), SIMULATED),
    Fault("breaks ties away from zero", _rounding(_ties_away), SIMULATED),
    Fault("rounds stochastically", _rounding(_stochastic), SIMULATED),
    Fault("flushes subnormals", _rounding(_flushed), SIMULATED),
    Fault("rounds twice, through bfloat16", _rounding(_twice), SIMULATED),
    Fault("encodes toward zero", _codes_toward_zero, PACKED),
    Fault("decodes subnormal codes as zero", _subnormal_codes_are_zero, PACKED),
    Fault("swaps the formats of forward and backward", _swapped_formats, SIMULATED),
    Fault("rounds to another format than the plan's", _table_row("1-4-3+4", "1-5-2"), SIMULATED),
    Fault("forgets the bias of a format", _table_row("1-4-3+4", "1-4-3"), SIMULATED),
    Fault("loses the scales", _lost_scale, SIMULATED),
    Fault("never refreshes the scales", _never_refreshed, SIMULATED),
    Fault("solves scales two binades low", _solved_low, SIMULATED),
    Fault("gradients 1 % too large", _gradients(lambda x: x * 1.01), SIMULATED),
    Fault("1 % of noise in the gradients", _gradients(_noise), SIMULATED),
    Fault("leaves an operator high, plan and all", _left_high, SIMULATED),
    Fault("leaves an operator high, though planned low", _one_site_unrounded, SIMULATED),
    Fault("groups off by one", _grouping_off_by_one, SIMULATED),
    Fault("demotes one group too few", _one_group_too_few, SIMULATED),
    Fault("holds weight gradients low", _weight_gradients_low, SIMULATED),
    Fault("ignores keep_high", _keep_high_ignored, KEPT),
    Fault("never promotes", _never_promoted, SIMULATED, loud=True),
    Fault("counts overflow from twice the limit", _overflow_at_twice, SIMULATED, loud=True),
)
