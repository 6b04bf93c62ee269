"""docs/papers.md and its pictures, from the kept results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from benchmarks.papers import catalog, store
from benchmarks.papers.claims import Claim, Verdict
from benchmarks.papers.found import Found, number
from benchmarks.papers.overview import overview
from benchmarks.papers.store import Result

INLINE = 120  # characters of figures that a claim's own line takes; more are a list
DOCS = Path(__file__).parents[2] / "docs"
HEAD = """# The papers' tables, run again

fxprec stands on five papers. This code runs their tables and figures again on a small scale and prints the paper's figure
beside ours. A figure of ours is the mean ± standard deviation over seeds. Every claim *holds*, is *not shown* (the
difference is within twice its standard error) or *fails*. Some claims were judged otherwise until their first figures were
seen; their tables say so.

One command makes this page: `python -m benchmarks.papers all --jobs 2`, 41 minutes of processor time on two cores
([how to add a table](../benchmarks/papers/__init__.py)). `--full` runs the longer sweeps. Not repeated are accuracies on
ImageNet, CIFAR, MNLI, Criteo, LibriSpeech and PASCAL, times on GPUs, and costs of multiply-accumulate units.

![claims and results](papers/overview.svg)
"""


def verdicts(table: ModuleType, found: Found) -> list[tuple[Claim, Verdict]]:
    """Each claim, judged; one seed where a table asks for several has no spread, and shows nothing."""
    judged = [(claim, _judge(claim, found)) for claim in table.CLAIMS]
    if table.SEEDS == 1 or len(found.seeds) > 1:
        return judged
    return [(claim, Verdict("not shown", f"one seed; {verdict.detail}".rstrip("; "))) for claim, verdict in judged]


def _judge(claim: Claim, found: Found) -> Verdict:
    try:
        return claim.judge(found)
    except KeyError as error:  # rows were renamed since
        return Verdict("not shown", f"what was kept has {error.args[0]}; measure --again")


def write(docs: Path = DOCS) -> Path:
    """Write papers.md and pictures for every table with a result; return the page's path."""
    pictures = docs / "papers"
    pictures.mkdir(exist_ok=True)
    results = {name: kept for name in catalog.built() if (kept := store.best(name)) is not None}
    judged = {name: verdicts(catalog.load(name), kept.found) for name, kept in results.items()}
    (pictures / "overview.svg").write_text(overview(judged), encoding="utf-8")
    parts = [HEAD]
    for key, paper in catalog.PAPERS.items():
        mine = [name for name in results if name.startswith(f"{key}.")]
        if mine:
            parts.append(f"## {paper.title}\n\n{paper.source}.\n")
        for name in mine:
            parts.append("\n".join(_section(name, results[name], judged[name], pictures)))
    path = docs / "papers.md"
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def _section(name: str, kept: Result, judged: list[tuple[Claim, Verdict]], pictures: Path) -> Iterator[str]:
    table, found = catalog.load(name), kept.found
    yield f"### {name}: {table.TITLE}\n"
    yield f"{table.SOURCE}. {_how(name, kept)}\n"
    yield from grid(table, found)
    yield ""
    for claim, verdict in judged:
        yield from _item(claim, verdict)
    picture = pictures / f"{name}.svg"
    if _is_drawn(table, found, picture):
        yield f"\n![{table.TITLE}](papers/{picture.name})"
    for label, content in (("Smaller here", table.SMALLER), ("Different here", table.DEVIATES)):
        if content:
            yield f"\n*{label}*: {content}"
    yield ""


def _item(claim: Claim, verdict: Verdict) -> Iterator[str]:
    """The claim, why it does not hold, and the figures: in the same line, or a line each where there are many."""
    why = f" *Why*: {claim.why}" if claim.why and verdict.state != "holds" else ""
    text = f"- **{verdict.state}**: {claim.sentence}.{why}"
    figures = verdict.detail.split("; ")
    if not verdict.detail:
        yield text
    elif len(figures) == 1 or len(verdict.detail) <= INLINE:
        yield f"{text} *Measured*: {verdict.detail}."
    else:
        yield f"{text} *Measured*:"
        yield from (f"  - {figure}" for figure in figures)


def _is_drawn(table: ModuleType, found: Found, path: Path) -> bool:
    """Whether the table has a picture, and what was kept has its rows; then it is written."""
    if not hasattr(table, "draw"):
        return False
    try:
        path.write_text(table.draw(found), encoding="utf-8")
    except KeyError:  # the claims say that it must be measured again
        return False
    return True


def _how(name: str, kept: Result) -> str:
    seeds, total = len(kept.seeds), sum(kept.seconds.values())
    many = "1 seed" if seeds == 1 else f"{seeds} seeds"
    path = store.path_of(name, kept.is_full)
    return (
        f"`python -m benchmarks.papers {name}{' --full' if kept.is_full else ''}`: {many}, {total:.0f} s of processor "
        f"time, {kept.machine['date']} ([figures](../benchmarks/results/papers/{path.name}))."
    )


def grid(table: ModuleType, found: Found) -> Iterator[str]:
    """The table in Markdown: for each column the paper's figure, where there is one, and ours."""
    for line in cells(table, found):
        yield f"| {' | '.join(line)} |"
        if line[0] == "":
            yield f"|{'---|' * len(line)}"


def cells(table: ModuleType, found: Found) -> Iterator[list[str]]:
    """The heading, its first cell empty, then a line for each row; rows that only the paper has come last."""
    published = table.PUBLISHED
    columns = list(dict.fromkeys([*found.columns, *(c for row in published.values() for c in row)]))
    with_paper = {c for row in published.values() for c in row}
    yield ["", *(h for c in columns for h in ([f"{c}: paper", "ours"] if c in with_paper else [c]))]
    for row in dict.fromkeys([*found.rows, *published]):
        line = [row]
        for c in columns:
            theirs = published.get(row, {}).get(c)
            if c in with_paper:
                line.append("" if theirs is None else number(theirs))
            line.append(found.text(row, c))
        yield line
