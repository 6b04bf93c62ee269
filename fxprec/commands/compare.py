"""``fxprec compare``: find the first tensor and step where two runs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fxprec.commands.output import AsJson, print_json


def compare(
    a: Annotated[Path, typer.Argument(help="Dump folder of a run that trained with options={'dump': DIR}.")],
    b: Annotated[Path, typer.Argument(help="Dump folder of another run of the same model on the same batches.")],
    tolerance: Annotated[
        float,
        typer.Option(
            help="Relative difference of largest magnitudes and dumped values that counts as different; 0: any."
        ),
    ] = 0.1,
    bitwise: Annotated[
        bool, typer.Option("--bitwise", help="Compare bit for bit, by the hashes that dump_tensors wrote.")
    ] = False,
    out: Annotated[str, typer.Option(help="Folder for a page and its JSON.")] = "",
    as_json: AsJson = False,
) -> None:
    """Report the tensors in which two runs first differ, step by step. Exit code 1 if the runs differ, 0 if not."""
    from fxprec.diagnosis.compare import compare as compare_both

    found = compare_both(a, b, tolerance=tolerance, bitwise=bitwise)
    print_json(found.to_dict()) if as_json else print(found)
    if out:
        page = found.save(out)
        if not as_json:
            print(page)
    raise typer.Exit(int(bool(found.partings)))
