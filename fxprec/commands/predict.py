"""``fxprec predict``: predict the step time with 32-, 16- and 8-bit gradients on a link, or a step on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxprec.commands.output import AsJson, print_json
from fxprec.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from fxprec.plan import Plan
    from fxprec.runtime.aps.predict import Layer, Prediction

FORWARD_SHARE = 1 / 3  # of a step's computation: backward computes two products for each product of forward


def predict(
    context: typer.Context,
    plan: Annotated[
        Path | None, typer.Argument(help="A plan file or a dump folder; the plan's groups are the layers.")
    ] = None,
    link: Annotated[str, typer.Option(help="Rate of each rank's link, for instance 200Mbit/s or 6GB/s.")] = "1Gbit/s",
    latency: Annotated[str, typer.Option(help="Latency of one message, for instance 0.2ms.")] = "0.1ms",
    world: Annotated[int, typer.Option(help="Ranks.")] = 4,
    group_size: Annotated[
        int | None, typer.Option(help="Ranks in each group of a hierarchical all-reduce. Default: one ring.")
    ] = None,
    step: Annotated[str, typer.Option(help="Compute time of a step on one rank, for instance 300ms.")] = "100ms",
    gpu: Annotated[
        str | None,
        typer.Option(help="Predict a step on this GPU instead, compared with bf16 autocast: h100, a100, b200, ..."),
    ] = None,
    paper: Annotated[bool, typer.Option("--paper", help="Print the paper's Tables 1 and 7 instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict the step time with 32-, 16- and 8-bit gradients (Dettmers 2016, appendix A), or a step on one GPU."""
    from fxprec.console import console_for
    from fxprec.runtime.aps.predict import CODINGS, Link, Way, parse_rate, parse_seconds, predict_step, verdict

    if paper or gpu is not None:
        _refuse_link_options(context, "--paper" if paper else "--gpu")
    if paper:
        print_json({"speedups": list(paper_rows())}) if as_json else console_for().print(paper_table())
        return
    if plan is None:
        raise ConfigError("predict needs a plan file, or --paper; write one with Plan.save or the dump option")
    if gpu is not None:
        from fxprec.commands.predict_gpu import show

        show(_one_plan(plan), gpu, as_json=as_json)
        return
    way = Way(world, group_size)
    seconds = parse_seconds(step)
    if not seconds:
        raise ConfigError(f"--step is {step}; give the time that a rank computes in a step, such as 300ms")
    made = _one_plan(plan)
    if not any(group.elements_by_kind.grad_param for group in made.groups):
        raise ConfigError(f"{plan}: has no gradients of parameters to exchange; give the plan of a training step")
    layers = layers_of(made, seconds)
    wire = Link(parse_rate(link), parse_seconds(latency))
    found = [predict_step(layers, way, wire, coding) for coding in CODINGS]
    if as_json:
        print_json({"predictions": found, "verdict": verdict(found)})
        return
    groups = "" if group_size is None else f" in groups of {group_size}"
    title = f"{world} ranks{groups}, {link}, {latency} a message: {way.steps} steps an all-reduce"
    console_for().print(_table(found, title))
    console_for().print(verdict(found))


def _refuse_link_options(context: typer.Context, beside: str) -> None:
    """Raise `ConfigError` if an option about a link is given beside ``beside``, which predicts no exchange."""
    for name in ("link", "latency", "world", "group_size", "step"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} is about gradients on a link, which {beside} does not predict; leave one of them out"
            )


def _one_plan(path: Path) -> Plan:
    """Return the plan of a file or of a dump folder. Raises `ConfigError` for a dump of several graphs."""
    from fxprec.report.load import plans_of

    found = plans_of(path)
    if len(found) > 1:
        raise ConfigError(
            f"{path}: holds {len(found)} graphs; give the folder of one, such as {path / next(iter(found))}"
        )
    return next(iter(found.values()))


def layers_of(plan: Plan, step_seconds: float) -> list[Layer]:
    """Return the plan's groups as layers, with the step's seconds divided by elements, a third of them forward."""
    from fxprec.runtime.aps.predict import Layer

    total = sum(g.elements for g in plan.groups)
    return [
        Layer(
            name=f"group {g.id}",
            elements=g.elements_by_kind.grad_param,
            forward=step_seconds * FORWARD_SHARE * g.elements / total,
            backward=step_seconds * (1 - FORWARD_SHARE) * g.elements / total,
        )
        for g in plan.groups
    ]


def _table(found: Sequence[Prediction], title: str) -> Table:
    from fxprec.console import columns

    right = ("MB sent", "exchange ms", "exposed ms", "step ms", "speedup")
    table = columns(("gradients",), right, title=title)
    for p in found:
        times = (p.bytes_sent / 1e6, p.communication * 1e3, p.exposed * 1e3, p.step * 1e3, found[0].step / p.step)
        table.add_row(p.coding, *(f"{value:.3g}" for value in times))
    return table


def paper_rows() -> Iterator[dict[str, Any]]:
    """Yield the rows of the paper's Tables 1 and 7: predicted and published speedups."""
    from fxprec.runtime.aps import predict_paper as p

    four = {bits: (p.four_gpu_speedup(bits), wanted) for bits, wanted in p.PUBLISHED_FOUR_GPUS.items()}
    yield _paper_row(4, 128, "nervana", four[32], four[8])
    for kernels, rows in p.PUBLISHED_CLUSTER.items():
        for row, published in zip(p.CLUSTER, rows, strict=True):
            found = p.cluster_speedup(row, 32, kernels), p.cluster_speedup(row, 8, kernels)
            yield _paper_row(96, row.sub_batch, kernels, *zip(found, published, strict=True))


def _paper_row(
    gpus: int, sub_batch: int, kernels: str, in_32: tuple[float, float], in_8: tuple[float, float]
) -> dict[str, Any]:
    found = {"gpus": gpus, "sub_batch": sub_batch, "kernels": kernels}
    return found | {
        name: {"predicted": speedup, "published": published}
        for name, (speedup, published) in (("32-bit", in_32), ("8-bit", in_8))
    }


def paper_table() -> Table:
    """Return Tables 1 and 7 of the paper, predicted and published side by side."""
    from fxprec.console import columns

    title = "Predicted speedup of AlexNet (published)"
    table = columns(("GPUs", "sub-batch", "kernels"), ("32-bit", "8-bit"), title=title)
    for row in paper_rows():
        cells = (f"{row[name]['predicted']:.3g} ({row[name]['published']:g})" for name in ("32-bit", "8-bit"))
        table.add_row(str(row["gpus"]), str(row["sub_batch"]), row["kernels"], *cells)
    return table
