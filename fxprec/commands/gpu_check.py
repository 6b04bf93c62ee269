"""``fxprec gpu-check``: check kernels, training and memory on a GPU; run this command first on a new GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from fxprec.commands.output import AsJson, names, print_json
from fxprec.errors import ConfigError, LoweringError, writing
from fxprec.gpu_check.run import LIMIT


def gpu_check(
    dry: Annotated[
        bool, typer.Option("--dry", help="Check on a CPU, without a GPU, the parts of the items that a CPU can check.")
    ] = False,
    only: Annotated[str, typer.Option(help="Items, for instance casts,products. Default: all.")] = "",
    limit: Annotated[float, typer.Option(help="Seconds an item may take.")] = LIMIT,
    out: Annotated[Path, typer.Option(help="Folder for the JSON and the text.")] = Path("fxprec-gpu-check"),
    as_json: AsJson = False,
) -> None:
    """Check this GPU against references: kernels, training, CUDA graphs, memory; write a report to send.

    Exit code 0: all passed; 1: something failed; 2: fxprec has no code for this machine.
    """
    from rich.markup import escape

    from fxprec.console import console_for
    from fxprec.gpu_check.findings import Findings
    from fxprec.gpu_check.items import Item, chosen
    from fxprec.gpu_check.report import Report, progress
    from fxprec.gpu_check.run import run_items

    if not 0 < limit < float("inf"):
        raise ConfigError(f"--limit is {limit:g}; give seconds above 0")
    items = chosen(list(names(only)))
    console, start = console_for(stderr=as_json), time.monotonic()
    with console.status("starting") as status:

        def watch(item: Item, findings: Findings) -> None:
            status.update(escape(progress(items, item, findings, time.monotonic() - start)))

        def done(item: Item, findings: Findings) -> None:
            if not console.is_terminal and not findings.refused:  # there is no status line in a file or a pipe
                print(Report((item,), (findings,), 0.0, dry).line(item), flush=True, file=console.file)

        found = run_items(items, dry=dry, limit=limit, watch=watch, done=done)
    for findings in found:
        if findings.refused:
            raise LoweringError(f"gpu-check: {findings.refused}")
    report = Report(items, tuple(found), time.monotonic() - start, dry)
    if as_json:
        print_json(report.to_dict())
    console.print(report.table())
    console.print(escape(report.last_line))
    with writing(f"--out {out}"):
        out.mkdir(parents=True, exist_ok=True)
        (out / "gpu-check.json").write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
        (out / "gpu-check.txt").write_text(report.text() + "\n", encoding="utf-8")
    console.print(escape(f"{out / 'gpu-check.txt'} can be pasted into an issue; gpu-check.json has every detail"))
    raise typer.Exit(0 if report.has_passed else 1)
