"""The ``fxprec`` command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fxprec.commands.choose import choose
from fxprec.commands.ci import ci
from fxprec.commands.compare import compare
from fxprec.commands.doctor import doctor
from fxprec.commands.gpu_check import gpu_check
from fxprec.commands.inspect import diff, dump, explain, report
from fxprec.commands.minify import minify
from fxprec.commands.predict import predict
from fxprec.errors import FxprecError

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    name="fxprec",
    help="Decide, tensor by tensor, what a PyTorch training step holds in 8 or 16 bits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for plans and the log.")] = Path("fxprec-demo"),
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the data.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps, and fp32 and fp8 only.")] = False,
    recipes: Annotated[str, typer.Option(help="Recipes, for instance fp32,hfp8. Default: all four.")] = "",
    only: Annotated[str, typer.Option(help="One model: digits or text. Default: both.")] = "",
    threads: Annotated[int, typer.Option(help="Threads to train with.")] = 1,
) -> None:
    """Train two small models on real data in fp32, bf16, fp8 and hfp8, and compare."""
    from fxprec.console import console_for
    from fxprec.demo.run import DemoOptions, run_demo

    chosen = tuple(name.strip() for name in recipes.split(",") if name.strip())
    run_demo(DemoOptions(out=out, seed=seed, quick=quick, recipes=chosen, only=only, threads=threads), console_for())


@app.command()
def formats() -> None:
    """List the named number formats and their limits."""
    from rich import box
    from rich.table import Table

    from fxprec.console import console_for
    from fxprec.numerics import formats as known

    table = Table(
        "name",
        "fxprec.numerics.formats",
        box=box.SIMPLE_HEAD,
        caption="Any other: 1-E-M[+bias][:ieee|:fn]",
        caption_justify="left",
    )
    for column in ("bits", "largest", "smallest normal", "smallest", "above it", "torch dtype"):
        table.add_column(column, justify="right")
    for constant, fmt in vars(known).items():
        if isinstance(fmt, known.Format):
            limits = (f"{x:.7g}" for x in (fmt.largest, fmt.smallest_normal, fmt.smallest_subnormal))
            native = str(fmt.torch_dtype or "-").removeprefix("torch.")
            table.add_row(fmt.name, constant, str(fmt.bits), *limits, str(fmt.overflow), native)
    console_for().print(table)
    console_for().print(_block_formats())


def _block_formats() -> Table:
    """Return the table of formats whose blocks share a scale."""
    from rich import box
    from rich.table import Table

    from fxprec.numerics import blocks as known

    table = Table("name", "fxprec.formats", "element", box=box.SIMPLE_HEAD, caption_justify="left")
    table.caption = "Any other: element/block:scale, as int4/64:bf16"
    for column in ("block", "scale", "offset", "tensor scale", "bits an element"):
        table.add_column(column, justify="right")
    for constant, fmt in vars(known).items():
        if isinstance(fmt, known.BlockFormat):
            offset, whole = "bf16" if fmt.has_offset else "-", "fp32" if fmt.tensor_scale else "-"
            size = f"{fmt.bits_per_element:g}"
            table.add_row(fmt.name, constant, fmt.element.name, str(fmt.block), fmt.scale, offset, whole, size)
    return table


@app.command()
def version() -> None:
    """Print the versions of fxprec and of the torch it runs on."""
    for name in ("fxprec", "torch"):
        print(name, metadata.version(name))


for command in (predict, dump, diff, explain, report, doctor, choose, compare, minify, ci, gpu_check):
    app.command()(command)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line on ``args``, by default the process's own.

    An `FxprecError` becomes one line on standard error and exit code 2.
    """
    try:
        app(args)
    except FxprecError as error:
        print(f"fxprec: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
