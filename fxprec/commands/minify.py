"""``fxprec minify``: find the tensors that cause an error, and write a small script that shows a failure."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxprec.commands.output import MAX_SEED, AsJson, given, print_json
from fxprec.errors import ConfigError, FxprecError, FxprecWarning, writing

if TYPE_CHECKING:
    from fxprec.config import Config
    from fxprec.minify.oracle import Failure
    from fxprec.testing.case import Case


def minify(
    target: Annotated[str, typer.Argument(help="path/file.py:factory or module:callable; returns (model, inputs).")],
    error_above: Annotated[
        float | None, typer.Option(help="Reduce while a tensor's relative error is above this number.")
    ] = None,
    crash: Annotated[bool, typer.Option("--crash", help="Reduce while compiling or running raises.")] = False,
    out: Annotated[Path, typer.Option(help="The script to write.")] = Path("repro.py"),
    recipe: Annotated[str, typer.Option(help="Recipe, for instance fp8.")] = "fp8",
    storage: Annotated[str, typer.Option(help="native, packed or simulate. Default: by recipe.")] = "",
    low_ratio: Annotated[float | None, typer.Option(help="Share of elements held low, 0 to 1.")] = None,
    policy: Annotated[str, typer.Option(help="Policy: which groups become low first.")] = "size",
    lowering: Annotated[str, typer.Option(help="eager (fast to try) or inductor.")] = "eager",
    tensor: Annotated[
        str, typer.Option(help="Tensor whose error to explain. Default: the one with the largest error.")
    ] = "",
    top: Annotated[int, typer.Option(help="How many tensors to list.")] = 10,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of weights and inputs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Find the tensors that cause an error when they are low; reduce an error or a crash to a small script."""
    from fxprec.config import Config, Settings

    if crash and error_above is not None:
        raise ConfigError("--crash and --error-above are both given; choose the failure to reduce")
    if top < 1:
        raise ConfigError(f"--top is {top}; give at least 1")
    # Promotion would remove the error after the first step.
    options = {"recipe": recipe, "policy": policy, "lowering": lowering, "promote_above": None}
    options |= given(storage=storage, low_ratio=low_ratio)
    config = Config.from_options(options)
    if not Settings.of(config).rounds_anything:
        raise ConfigError(f"recipe {recipe!r} holds everything in float32, so it adds no error; choose 'fp8'")
    from fxprec.report.target import called, find_factory
    from fxprec.testing.case import Case

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FxprecWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        factory = find_factory(target)
        case = Case.make(lambda: called(factory, target), seed=seed)
        _refuse_what_fails_by_itself(case, target)
        failure = _failure(case, config, target, error_above) if crash or error_above is not None else None
        found: dict[str, Any] = {}
        if not crash:
            from fxprec.minify.culprits import find_culprits

            search = find_culprits(case, config, tensor=tensor or None, top=top)
            found = search.to_dict()
            if not as_json:
                print(search.text())
        if failure is not None:
            reduced = _reduce(case, failure, options, target, error_above, out, seed)
            found |= {"reduced": reduced}
            if not as_json:
                print("{operators} operators reduced to {left}: {failure}\n{script}".format(**reduced))
    if as_json:
        print_json(found)


def _refuse_what_fails_by_itself(case: Case, target: str) -> None:
    """Raise `ConfigError` for a model that fails uncompiled too, so that no low tensor is the cause."""
    from fxprec.report.target import line_of

    try:
        case.run_as_it_is()
    except FxprecError:
        raise
    except Exception as error:
        raise ConfigError(
            f"target {target!r}: {case.name} does not run on its inputs, uncompiled either: {line_of(error)}; give the "
            "inputs that model(*inputs) takes, or mend its forward"
        ) from error


def _failure(case: Case, config: Config, target: str, limit: float | None) -> Failure:
    from fxprec.minify.oracle import Crashes, ErrorAbove

    failure = Crashes(config) if limit is None else ErrorAbove(config, limit)
    if not failure.fails(case):
        raise ConfigError(f"target {target!r} does not fail: {failure.describe(case)}; nothing to reduce")
    return failure


def _reduce(
    case: Case, failure: Failure, options: dict[str, Any], target: str, limit: float | None, out: Path, seed: int
) -> dict[str, Any]:
    """Reduce the failure and write the script; return the numbers of operators, the failure and the script's path."""
    from fxprec.minify.piece import capture
    from fxprec.minify.reduce import reduced
    from fxprec.minify.script import script
    from fxprec.testing.case import STEPS

    whole = capture(case)
    if not failure.fails(whole.case(seed)):
        raise ConfigError(
            f"target {target!r} fails on its own inputs, and not on random ones of the same shapes, means and "
            f"deviations ({failure.describe(whole.case(seed))}); let the factory return inputs that are random"
        )
    small = reduced(whole, lambda piece: failure.fails(piece.case(seed)))
    said = failure.describe(small.case(seed))
    text = script(small, target=target, failure=said, options=options, seed=seed, limit=limit, steps=STEPS)
    with writing(out, "path"):
        out.write_text(text, encoding="utf-8")
    return {"operators": len(whole.operators), "left": len(small.operators), "failure": said, "script": str(out)}
