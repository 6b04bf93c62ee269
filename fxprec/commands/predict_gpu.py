"""``fxprec predict PLAN --gpu NAME``: predict a step on a GPU with and without low precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxprec.commands.output import print_json
from fxprec.errors import ConfigError, did_you_mean
from fxprec.passes.analysis.gemm_costs import known_gpus
from fxprec.plan import Plan
from fxprec.report.gpu_step import Layer, Prediction, predict, to_dict

if TYPE_CHECKING:
    from rich.table import Table


def show(plan: Plan, name: str, *, as_json: bool) -> None:
    """Print the prediction for a GPU. Raises `ConfigError` for a GPU whose figures are not known."""
    from fxprec.console import console_for

    known = known_gpus()
    if name.lower() not in known:
        raise ConfigError(
            f"--gpu {name}: no figures{did_you_mean(name.lower(), list(known))}; there are {', '.join(known)}"
        )
    found = predict(plan, known[name.lower()])
    if as_json:
        print_json(to_dict(found))
        return
    console_for().print(_steps(found))
    console_for().print(_gemms(found))
    console_for().print("\n".join(_assumed(found)))


def _steps(found: Prediction) -> Table:
    from fxprec.console import columns

    right = ("ms", "of autocast", "peak GB", "of autocast", "layers over codes")
    table = columns(("step",), right, title=f"{found.gpu} ({found.source})")
    base = found.steps[0]
    for step in found.steps:
        shares = (_share(step.seconds, base.seconds), _share(step.peak_bytes, base.peak_bytes))
        numbers = (f"{step.seconds * 1e3:.3g}", shares[0], f"{step.peak_bytes / 1e9:.3g}", shares[1])
        table.add_row(step.name, *numbers, str(len(step.low)))
    return table


def _share(found: float, base: float) -> str:
    return f"{found / base:.2f}" if base else "-"


def _gemms(found: Prediction) -> Table:
    from rich.markup import escape

    from fxprec.console import columns

    table = columns(("layer", "rows x columns x inner", "multiplying codes"), ())
    for layer, pays in found.layers:
        table.add_row(
            escape(layer.module), _size(layer), "pays" if pays else "does not pay" if layer.weight else "no kernel"
        )
    return table


def _size(layer: Layer) -> str:
    return f"{layer.rows} x {layer.columns} x {layer.inner}" if layer.weight else f"attention, {layer.flops:.2g} flop"


def _assumed(found: Prediction) -> list[str]:
    lines = [
        "Assumed: GEMMs and memory at the rates of this GPU, one after another; attention in bf16, causal; a tensor",
        "that a GEMM reads or makes is read or written once outside it, each way; no optimizer, no communication.",
    ]
    if found.left_out:
        lines.append(f"{found.left_out} GEMMs are left out: the plan does not record their sizes.")
    return lines
