"""Write a text per pass while passes run, to the dump folder and to torch's structured trace."""

from __future__ import annotations

from itertools import count

from fxprec import compat
from fxprec.passes import pipeline
from fxprec.passes.base import Work
from fxprec.passes.pass_report import PassReport
from fxprec.plan import Plan
from fxprec.plan.files import dumps
from fxprec.report.folder import GraphDump
from fxprec.report.graph_text import graph_text


def run_passes(work: Work, dump: GraphDump | None) -> list[PassReport]:
    """Run the pipeline; write texts only for a dump that needs them, or for a trace.

    Raises `ConfigError` if the dump cannot be written.
    """
    passes = pipeline.pipeline_for(work.settings)
    dump = dump if dump is not None and dump.looks_on else None
    if dump is None and not compat.traces_artifacts():
        return pipeline.run(work, passes)
    numbers = count()

    def tell(name: str, changed: dict[str, tuple[int, int]]) -> None:
        number = f"{next(numbers):02}-{name}"
        text = graph_text(work, number, changed)
        compat.trace_artifact(f"fxprec_{number}", "string", text)
        if dump is not None:
            dump.write_text(number, text)

    def after(report: PassReport, work: Work) -> None:
        tell(report.name, report.changed)
        if dump is not None:
            dump.draw(work)

    if dump is not None:
        dump.start()
    tell("joint", {})
    return pipeline.run(work, passes, after)


def write_plan(plan: Plan, dump: GraphDump | None) -> None:
    """Write a complete plan, which includes the bytes that its partitioned graph saves.

    Raises `Planned` if the dump needs only the plan, and `ConfigError` if it cannot be written.
    """
    compat.trace_artifact("fxprec_plan", "json", dumps(plan))
    if dump is not None:
        dump.finish(plan)
