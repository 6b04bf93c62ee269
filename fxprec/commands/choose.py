"""``fxprec choose``: find the largest low ratio that a small training run of the user tolerates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fxprec.commands.output import AsJson, given, print_json, teller
from fxprec.errors import ConfigError


def choose(
    target: Annotated[
        str, typer.Argument(help="path/file.py:function or module:callable; called as function(backend, seed).")
    ],
    out: Annotated[Path | None, typer.Option(help="JSON file for the trials.")] = None,
    recipe: Annotated[str, typer.Option(help="Recipe to train with, for instance fp8.")] = "fp8",
    storage: Annotated[str, typer.Option(help="native, packed or simulate. Default: by recipe.")] = "",
    policy: Annotated[str, typer.Option(help="size, exact, ...")] = "size",
    ratios: Annotated[str, typer.Option(help="Low ratios to try. Default: 0 to 1 in tenths.")] = "",
    seeds: Annotated[int, typer.Option(help="Runs at each ratio.")] = 3,
    tolerance: Annotated[float, typer.Option(help="How much worse the score may be, in the score's own units.")] = 0.01,
    higher: Annotated[bool, typer.Option("--higher", help="A higher score is better, such as an accuracy.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a small run at several low ratios and choose the largest ratio whose score is within the tolerance."""
    from fxprec.diagnosis.choose import RATIOS
    from fxprec.diagnosis.choose import choose as run_trials
    from fxprec.report.target import called, find_factory

    train = find_factory(target)
    found = run_trials(
        lambda backend, seed: called(train, target, backend, seed),
        options={"recipe": recipe, "policy": policy} | given(storage=storage),
        ratios=_numbers(ratios) if ratios else RATIOS,
        seeds=seeds,
        tolerance=tolerance,
        higher_is_better=higher,
        tell=teller(as_json=as_json),
    )
    print_json(found.to_dict()) if as_json else print(f"\n{found}")
    if out is not None:
        found.save(out)
        if not as_json:
            print(out)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--ratios {text!r} is not a list of numbers; write for instance 0.5,0.8,1") from None
