"""``fxprec export``: write a plan's forward formats as the config of an inference engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fxprec.commands.output import modules
from fxprec.errors import ConfigError, writing

if TYPE_CHECKING:
    from fxprec.plan import Plan


def export(
    target: Annotated[
        str, typer.Argument(help="A plan file or dump folder; or path/file.py:factory, which is planned.")
    ],
    to: Annotated[str, typer.Option(help="compressed-tensors: what vLLM and SGLang read.")] = "compressed-tensors",
    out: Annotated[Path | None, typer.Option(help="JSON file to write. Default: standard output.")] = None,
    recipe: Annotated[
        str, typer.Option(help="Recipe to plan a factory with: fp8, mxfp8 or nvfp4. Default: mxfp8.")
    ] = "",
    keep_high: Annotated[
        str, typer.Option(help="Modules to hold high when planning a factory, for instance lm_head.")
    ] = "",
    low_ratio: Annotated[
        float | None, typer.Option(help="Share of elements to hold low when planning a factory.")
    ] = None,
) -> None:
    """Write the formats of a plan's forward products as a model's quantization_config."""
    if to != "compressed-tensors":
        raise ConfigError(f"--to is {to!r}; the only config that is written is 'compressed-tensors'")
    from fxprec.integrations.compressed_tensors import to_compressed_tensors

    with redirect_stdout(sys.stderr):  # what the factory prints is no part of the config
        plans = _plans(target, recipe, keep_high, low_ratio)
    exported = to_compressed_tensors(plans)
    for remark in exported.remarks:
        print(f"note: {remark}", file=sys.stderr)
    text = json.dumps(exported.config, indent=2)
    if out is None:
        print(text)
        return
    with writing(out, "path"):
        out.write_text(text + "\n", encoding="utf-8")
    print(out)


def _plans(target: str, recipe: str, keep_high: str, low_ratio: float | None) -> Sequence[Plan]:
    if Path(target).exists():
        if recipe or keep_high or low_ratio is not None:
            raise ConfigError(
                f"--recipe, --keep-high and --low-ratio plan a factory, and {target} has its plan; leave them out"
            )
        from fxprec.report.load import plans_of

        return list(plans_of(Path(target)).values())
    from fxprec.config import Config
    from fxprec.driver.backend import Backend
    from fxprec.report.plan_taker import PlanTaker
    from fxprec.report.target import find_factory, plan_under_fakes

    config = Config(recipe=recipe or "mxfp8", keep_high=modules(keep_high), low_ratio=low_ratio, lowering="eager")
    taker = PlanTaker()
    plan_under_fakes(find_factory(target), Backend(config, dump=taker), target, taker)
    for line in taker.told:
        print(f"not done: {line}")
    return taker.plans
