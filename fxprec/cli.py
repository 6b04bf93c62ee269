"""The ``fxprec`` command line. Slow modules such as torch are imported only by the commands that need them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxprec.commands.choose import choose
from fxprec.commands.ci import ci
from fxprec.commands.compare import compare
from fxprec.commands.doctor import doctor
from fxprec.commands.env import env
from fxprec.commands.export import export
from fxprec.commands.fits import fits
from fxprec.commands.gpu_check import gpu_check
from fxprec.commands.inspect import diff, dump, explain, report
from fxprec.commands.measure import measure
from fxprec.commands.minify import minify
from fxprec.commands.output import MAX_SEED, AsJson, names, print_json
from fxprec.commands.predict import predict
from fxprec.errors import FxprecError

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    name="fxprec",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print("fxprec", metadata.version("fxprec"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print fxprec's version.")
    ] = False,
) -> None:
    """Decide tensor by tensor what a PyTorch training step may keep in 8 or 16 bits."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for plans and the log.")] = Path("fxprec-demo"),
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Seed of the weights and of the order of the data.")
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps, and fp32 and fp8 only.")] = False,
    recipes: Annotated[str, typer.Option(help="Recipes, for instance fp32,hfp8. Default: all four.")] = "",
    only: Annotated[str, typer.Option(help="One model: digits or text. Default: both.")] = "",
    threads: Annotated[int, typer.Option(help="Threads to train with.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Train two small models on real data in fp32, bf16, fp8 and hfp8, and compare."""
    from fxprec.console import console_for
    from fxprec.demo.run import DemoOptions, result_of, run_demo

    asked = DemoOptions(out=out, seed=seed, quick=quick, recipes=names(recipes), only=only, threads=threads)
    outcomes = run_demo(asked, console_for(stderr=as_json))
    if as_json:
        print_json([{"model": o.task, "recipe": o.recipe} | result_of(o) for o in outcomes])


@app.command()
def formats(as_json: AsJson = False) -> None:
    """List the named number formats and their limits."""
    if as_json:
        print_json({"formats": list(_formats()), "block_formats": list(_block_formats())})
        return
    from fxprec.console import columns, console_for

    right = ("bits", "largest", "smallest normal", "smallest", "above it", "torch dtype")
    table = columns(("name", "fxprec.formats"), right, caption="Any other: 1-E-M[+bias][:ieee|:fn]")
    for row in _formats():
        limits = (f"{row[name]:.7g}" for name in ("largest", "smallest_normal", "smallest"))
        native = row["torch_dtype"] or "-"
        table.add_row(row["name"], row["constant"], str(row["bits"]), *limits, row["overflow"], native)
    console_for().print(table)
    console_for().print(_block_table())


def _formats() -> Iterator[dict[str, Any]]:
    """Yield each named format as data."""
    from fxprec.numerics import formats as known

    for constant, fmt in vars(known).items():
        if isinstance(fmt, known.Format):
            limits = {
                "largest": fmt.largest,
                "smallest_normal": fmt.smallest_normal,
                "smallest": fmt.smallest_subnormal,
            }
            native = None if fmt.torch_dtype is None else str(fmt.torch_dtype).removeprefix("torch.")
            named = {"name": fmt.name, "constant": constant, "bits": fmt.bits}
            yield named | limits | {"overflow": str(fmt.overflow), "torch_dtype": native}


def _block_formats() -> Iterator[dict[str, Any]]:
    """Yield each named format whose blocks share a scale, as data."""
    from fxprec.numerics import blocks as known

    for constant, fmt in vars(known).items():
        if isinstance(fmt, known.BlockFormat):
            yield {
                "name": fmt.name,
                "constant": constant,
                "element": fmt.element.name,
                "block": fmt.block,
                "scale": fmt.scale,
                "offset": "bf16" if fmt.has_offset else None,
                "tensor_scale": "fp32" if fmt.tensor_scale else None,
                "bits_per_element": fmt.bits_per_element,
            }


def _block_table() -> Table:
    """Return the table of formats whose blocks share a scale."""
    from fxprec.console import columns

    right = ("block", "scale", "offset", "tensor scale", "bits an element")
    caption = "Any other: element/block:scale, as int4/64:bf16"
    table = columns(("name", "fxprec.formats", "element"), right, caption=caption)
    for row in _block_formats():
        named = (row["name"], row["constant"], row["element"], str(row["block"]), row["scale"])
        table.add_row(*named, row["offset"] or "-", row["tensor_scale"] or "-", f"{row['bits_per_element']:g}")
    return table


@app.command()
def version() -> None:
    """Print the versions of fxprec and of the torch it runs on."""
    for name in ("fxprec", "torch"):
        print(name, metadata.version(name))


for command in (
    measure, predict, fits, dump, diff, explain, report, doctor, choose, compare, export, minify, ci, gpu_check, env,
):  # fmt: skip
    app.command()(command)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line on ``args``, by default the process's own.

    An `FxprecError` becomes one line on standard error and exit code 2.
    """
    try:
        app(args, prog_name="fxprec")
    except FxprecError as error:
        print(f"fxprec: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
