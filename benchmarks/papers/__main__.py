"""Run tables of the papers, print them, keep them, and write docs/papers.md.

    python -m benchmarks.papers list
    python -m benchmarks.papers page
    python -m benchmarks.papers NAME ... | all [--full] [--seeds N] [--again] [--jobs N]

``page`` only writes docs/papers.md from what was kept. What a former run kept is not measured again (``--again`` does). Ends with 1 if a claim fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.papers import catalog, page, store
from benchmarks.papers.claims import STATES, State
from benchmarks.papers.running import Job, results
from benchmarks.papers.store import Result

ALL_SEEDS = 3  # of `all`, where a table asks for more
STYLES = {"holds": "green", "not shown": "yellow", "fails": "red"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="list, page, all, tables, or papers (bf16 is bf16.*)")
    parser.add_argument("--full", action="store_true", help="the longer sweeps")
    parser.add_argument("--seeds", type=int, metavar="N", help="instead of each table's own number")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="tables at once, a process each")
    parser.add_argument("--again", action="store_true", help="measure again what was kept")
    args = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    if args.names == ["list"]:
        _list(console)
        return 0
    if args.names == ["page"]:
        console.print(f"wrote {page.write().name}")
        return 0
    try:
        names = selected(args.names)
    except KeyError as error:
        parser.error(f"unknown table {error.args[0]!r}; `list` names them")
    for name, reason in {n: getattr(catalog.load(n), "unable", str)() for n in names}.items():
        if reason:
            console.print(f"{name}: skipped, {reason}")
            names.remove(name)
    seeds = {n: number_of_seeds(catalog.load(n).SEEDS, args.seeds, "all" in args.names, args.full) for n in names}
    jobs = [Job(name, seeds[name], args.full, args.again) for name in names]
    states: list[State] = []
    for kept in results(jobs, args.jobs, console):
        states.extend(_show(kept, console))
    counts = {state: states.count(state) for state in STATES}
    console.print(", ".join(f"{state}: {n}" for state, n in counts.items()), f"; wrote {page.write().name}", sep="")
    return 1 if counts["fails"] else 0


def selected(words: Sequence[str]) -> list[str]:
    """Tables that the words name, in the papers' order. Raises KeyError for one that names nothing."""
    chosen = set()
    for word in words:
        found = [n for n in catalog.built() if word in ("all", n) or n.startswith(f"{word}.")]
        if not found:
            raise KeyError(word)
        chosen.update(found)
    return [name for name in catalog.NAMES if name in chosen]


def number_of_seeds(own: int, asked: int | None, is_all: bool, is_full: bool) -> int:
    """A table without randomness has one seed, whatever is asked for."""
    if own == 1:
        return 1
    return asked or (min(own, ALL_SEEDS) if is_all and not is_full else own)


def _show(kept: Result, console: Console) -> list[State]:
    name, table, found = kept.name, catalog.load(kept.name), kept.found
    heading, *lines = page.cells(table, found)
    shown = Table(
        *heading, title=f"{name}: {table.TITLE} ({table.SOURCE}; {len(kept.seeds)} seeds)", title_justify="left"
    )
    for line in lines:
        shown.add_row(*line)
    console.print(shown)
    states = []
    for claim, verdict in page.verdicts(table, found):
        states.append(verdict.state)
        console.print(f"[{STYLES[verdict.state]}]{verdict.state:9}[/] {claim.text}  {verdict.detail}", highlight=False)
    return states


def _list(console: Console) -> None:
    for name in catalog.NAMES:
        table = catalog.load(name) if catalog.is_built(name) else None
        kept = store.best(name)
        state = "not built" if table is None else f"{table.TITLE} ({table.SOURCE})"
        console.print(f"{name:26}{state}{'' if kept is None else f'; kept: {len(kept.seeds)} seeds'}", highlight=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
