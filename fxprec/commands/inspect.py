"""``fxprec dump``, ``diff``, ``explain`` and ``report``: make, compare, explain and show plans."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fxprec.commands.output import AsJson, modules, names, print_json
from fxprec.errors import ConfigError, PlanError, writing

if TYPE_CHECKING:
    from fxprec.plan import PeakBytes


def dump(
    target: Annotated[str, typer.Argument(help="path/file.py:factory or module:callable; returns (model, inputs).")],
    out: Annotated[Path, typer.Option(help="Folder for the dump.")] = Path("fxprec-dump"),
    recipe: Annotated[str, typer.Option(help="Recipe, for instance fp8.")] = "fp8",
    storage: Annotated[str, typer.Option(help="native, packed or simulate. Default: by recipe.")] = "",
    low_ratio: Annotated[float | None, typer.Option(help="Share of elements held low, 0 to 1.")] = None,
    budget: Annotated[str, typer.Option(help="Budget of bytes saved for backward, instead of a share: 12GiB.")] = "",
    peak_budget: Annotated[str, typer.Option(help="Bytes a step may hold: 40GiB, or 60%.")] = "",
    ways: Annotated[str, typer.Option(help="How the budget may be met: narrow,recompute,offload (on GPUs).")] = "",
    keep_high: Annotated[str, typer.Option(help="Modules held high, for instance head,layers.0.")] = "",
    policy: Annotated[str, typer.Option(help="Policy: which groups become low first.")] = "size",
    grouping: Annotated[str, typer.Option(help="execution, or dataflow: regions between GEMMs.")] = "execution",
    cpu: Annotated[
        str, typer.Option(help="Plan for this processor: avx2 or avx512+bf16. Default: this machine's.")
    ] = "",
) -> None:
    """Plan a model under fake tensors (no weights, no run) and dump every pass, the plan and a report."""
    from fxprec.config import Config, Settings

    config = Config(
        recipe=recipe,
        storage=storage or None,  # type: ignore[arg-type]
        low_ratio=low_ratio,
        activation_budget=budget or None,
        peak_budget=peak_budget or None,
        ways=names(ways) if ways else None,
        keep_high=modules(keep_high),
        policy=policy,
        grouping=grouping,  # type: ignore[arg-type]
        cpu=cpu or None,
        lowering="eager",
        dump=out,
    )
    if not (Settings.of(config).rounds_anything or peak_budget):
        raise ConfigError(f"recipe {recipe!r} holds everything in float32, so there is nothing to plan; choose 'fp8'")
    if policy == "exact":
        raise ConfigError("policy 'exact' measures a training step, and fxprec dump runs none; choose 'size'")
    import torch

    from fxprec.driver.backend import Backend
    from fxprec.plan import Plan
    from fxprec.report.dump_folder import DumpFolder
    from fxprec.report.target import find_factory, plan_under_fakes

    factory = find_factory(target)
    _empty(out)
    folder = DumpFolder(out, plan_only=True)
    folder.forget()
    plan_under_fakes(factory, Backend(config, dump=folder), target, folder)
    for line in folder.told:
        print(f"not done: {line}", file=sys.stderr)
    for graph in sorted(folder.root.glob("graph-*")):
        print(graph)
        plan = Plan.load(graph / "plan.json")
        if plan.is_evaluation:
            print("  evaluation: no backward half, so nothing is held for it")
        elif plan.peak_bytes is not None:
            print(_peak_line(plan.peak_bytes))
            if "offload" in (config.ways or ()) and not torch.cuda.is_available():
                print(
                    "  planned for a GPU: training on a CPU, where saved tensors are in host memory, refuses 'offload'"
                )


def _peak_line(peak: PeakBytes) -> str:
    from fxprec.passes.notice import readable

    planned, high, budget = (readable(size) for size in (peak.planned, peak.high, peak.budget))
    return f"  holds {planned} at its peak, within {budget}; {high} with everything kept high"


def _empty(out: Path) -> None:
    """Remove only the graphs of an earlier dump."""
    for old in out.glob("graph-*") if out.is_dir() else ():
        if (old / "00-joint.txt").exists():
            shutil.rmtree(old)


def diff(
    a: Annotated[Path, typer.Argument(help="A plan file or dump folder.")],
    b: Annotated[Path, typer.Argument(help="Another.")],
    as_json: AsJson = False,
) -> None:
    """Report the differences between two plans, with reasons and bytes. Exit code 1 if the plans differ, 0 if not."""
    from fxprec.report.compare import data
    from fxprec.report.load import plans_of

    ours, theirs = plans_of(a), plans_of(b)
    if len(ours) == len(theirs) == 1:
        ours, theirs = {"": next(iter(ours.values()))}, {"": next(iter(theirs.values()))}
    found = {}
    for name in dict.fromkeys([*ours, *theirs]):
        if name in ours and name in theirs:
            found[name] = data(ours[name], theirs[name])
        else:
            found[name] = {"moved": [], "differences": [f"only in {a if name in ours else b}"]}
    lines = [f"{name}: {line}" if name else line for name in found for line in found[name]["differences"]]
    if as_json:
        print_json({"graphs": found})
    elif lines:
        print("\n".join(lines))
    raise typer.Exit(int(bool(lines)))


def explain(
    plan: Annotated[Path, typer.Argument(help="A plan file, a dump folder, or the plan file of a link.")],
    tensor: Annotated[
        str,
        typer.Argument(
            help="Name of a tensor or module, or a site's number; or lowering, peak_budget, step_budget. Left out: "
            "every tensor held for backward. For a link's plan, the name of a layer."
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the tensors saved for backward: module, source line, format, and bytes beside those in bf16 and fp32.

    With a name: explain a tensor's precision, the choice of lowering, or a step's memory under its budget.
    For a link's plan: list the bits of each layer's gradient, the exposed time, and the rounding error.
    """
    from fxprec.plan import saved_tensors
    from fxprec.plan.explain import explain as explained
    from fxprec.report.load import is_link_plan, plans_of

    if is_link_plan(plan):
        from fxprec.runtime.aps import link_plan

        _print_lines(link_plan.explained(link_plan.LinkPlan.load(plan), tensor), as_json=as_json)
        return
    plans = plans_of(plan)
    if len(plans) > 1:
        names = (name + " (evaluation)" * found.is_evaluation for name, found in plans.items())
        raise PlanError(f"{plan}: holds {len(plans)} graphs; give one of {', '.join(names)} in it")
    (found,) = plans.values()
    if as_json and not tensor:
        print_json(saved_tensors.data(found))
        return
    _print_lines(explained(found, tensor), as_json=as_json)


def _print_lines(lines: Iterable[str], *, as_json: bool) -> None:
    if as_json:
        print_json({"lines": list(lines)})
    else:
        print("\n".join(lines))


def report(
    folder: Annotated[Path, typer.Argument(help="A dump folder, or a plan file.")],
    dot: Annotated[bool, typer.Option("--dot", help="Write graph.dot, for Graphviz, as well.")] = False,
) -> None:
    """Write report.html again beside each plan, from the current plan and the statistics so far."""
    from fxprec.report.dot import dot_text
    from fxprec.report.drawing import FILE, Drawing
    from fxprec.report.html import write_report
    from fxprec.report.load import plans_of

    for name, plan in plans_of(folder).items():
        place = folder / name if folder.is_dir() else folder.parent
        title = place.resolve().name
        drawing = Drawing.load(place / FILE, plan)
        if dot and drawing is None:
            raise ConfigError(f"{place}: has no {FILE}, which --dot draws; dump the model again")
        with writing(place):
            print(write_report(plan, place, title=title, drawing=drawing))
            if dot and drawing is not None:
                (place / "graph.dot").write_text(dot_text(plan, drawing, title), encoding="utf-8")
                print(place / "graph.dot")
