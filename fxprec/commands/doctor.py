"""``fxprec doctor``: which stored tensor does what damage, in which format, and what to do about it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fxprec.errors import ConfigError


def doctor(
    target: Annotated[
        str,
        typer.Argument(help="path/file.py:factory or module:callable; returns (model, batch) or (model, batch, loss)."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the page and its JSON.")] = Path("fxprec-doctor"),
    recipe: Annotated[str, typer.Option(help="Recipe to examine, for instance fp8.")] = "fp8",
    storage: Annotated[str, typer.Option(help="native, packed or simulate. Default: by recipe.")] = "",
    low_ratio: Annotated[float | None, typer.Option(help="Share of elements held low, 0 to 1.")] = None,
    plan: Annotated[str, typer.Option(help="Instead: a plan file to examine.")] = "",
    keep_high: Annotated[str, typer.Option(help="Modules held high, for instance head,layers.0.")] = "",
    formats: Annotated[str, typer.Option(help="Candidate formats, for instance e4m3fn,e5m2.")] = "",
    tolerance: Annotated[float | None, typer.Option(help="Damage a recommendation may do. Default: 0.1.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Instead: saved states of a run, for instance 'run/step-*.pt'.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of weights and batch.")] = 0,
) -> None:
    """Examine one training step: what each stored tensor costs in each format, checked; recommend options.

    With --checkpoint: which modules became fragile when.
    """
    import torch

    from fxprec.diagnosis.doctor import doctor as examine
    from fxprec.report.target import find_factory

    options: dict[str, Any] = {"recipe": recipe}
    options |= {"storage": storage} if storage else {}
    options |= {} if low_ratio is None else {"low_ratio": low_ratio}
    options |= {"plan": plan} if plan else {}
    options |= {"keep_high": _names(keep_high)} if keep_high else {}
    options |= {"formats": _names(formats)} if formats else {}
    options |= {} if tolerance is None else {"tolerance": tolerance}
    factory, start = find_factory(target), time.perf_counter()
    torch.manual_seed(seed)
    model, batch, loss = _made(factory(), target)

    def tell(line: str) -> None:
        print(f"[{time.perf_counter() - start:5.1f} s] {line}", flush=True)

    if checkpoint:
        from fxprec.diagnosis.checkpoints import over_checkpoints

        print(f"\n{over_checkpoints(model, batch, checkpoint, loss=loss, options=options, tell=tell)}")
        return
    found = examine(model, batch, loss=loss, options=options, tell=tell)
    print(f"\n{found}")
    print(found.save(out))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _made(result: Any, target: str) -> tuple[Any, Any, Any]:
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        raise ConfigError(
            f"target {target!r} returned {type(result).__name__}; let it return (model, batch) or (model, batch, loss)"
        )
    return result[0], result[1], result[2] if len(result) == 3 else None
