"""``fxprec doctor``: measure the damage of each stored tensor in each format, and recommend options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fxprec.commands.output import MAX_SEED, AsJson, given, modules, names, print_json, teller
from fxprec.errors import ConfigError


def doctor(
    target: Annotated[
        str,
        typer.Argument(help="path/file.py:factory or module:callable; returns (model, batch) or (model, batch, loss)."),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for the page and its JSON. Default: fxprec-doctor.")] = None,
    recipe: Annotated[str, typer.Option(help="Recipe to examine, for instance fp8.")] = "fp8",
    storage: Annotated[str, typer.Option(help="native, packed or simulate. Default: by recipe.")] = "",
    low_ratio: Annotated[float | None, typer.Option(help="Share of elements held low, 0 to 1.")] = None,
    plan: Annotated[str, typer.Option(help="Examine this plan file instead of planning.")] = "",
    keep_high: Annotated[str, typer.Option(help="Modules held high, for instance head,layers.0.")] = "",
    formats: Annotated[str, typer.Option(help="Candidate formats, for instance e4m3fn,e5m2.")] = "",
    tolerance: Annotated[float | None, typer.Option(help="Damage a recommendation may do. Default: 0.1.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Examine saved states of a run, for instance 'run/step-*.pt'.")] = "",
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of weights and batch.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure in one training step the damage that each stored tensor does in each format; recommend options.

    With --checkpoint: report which modules became fragile, and when.
    """
    import torch

    from fxprec.diagnosis.doctor import doctor as examine
    from fxprec.report.target import called, find_factory, model_and_batch

    unused = given(out=out, formats=formats, tolerance=tolerance)
    if checkpoint and unused:
        name = next(iter(unused))
        raise ConfigError(f"--{name} has no effect with --checkpoint, which prints damages as planned; leave it out")
    options = {"recipe": recipe} | given(storage=storage, low_ratio=low_ratio, plan=plan, tolerance=tolerance)
    options |= given(keep_high=keep_high and modules(keep_high), formats=formats and names(formats))
    factory, tell = find_factory(target), teller(as_json=as_json)
    torch.manual_seed(seed)
    model, batch, loss = model_and_batch(called(factory, target), target)
    if checkpoint:
        from fxprec.diagnosis.checkpoints import over_checkpoints

        course = over_checkpoints(model, batch, checkpoint, loss=loss, options=options, tell=tell)
        print_json(course) if as_json else print(f"\n{course}")
        return
    found = examine(model, batch, loss=loss, options=options, tell=tell)
    print_json(found.to_dict()) if as_json else print(f"\n{found}")
    page = found.save(out or Path("fxprec-doctor"))
    if not as_json:
        print(page)
