"""Write a text per pass while passes run, to the dump folder and to torch's structured trace."""

from __future__ import annotations

from dataclasses import dataclass

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
    if (dump is None or not dump.looks_on) and not compat.traces_artifacts():
        return pipeline.run(work, pipeline.pipeline_for(work.settings))
    return _Watch(dump).run(work)


def write_plan(plan: Plan, dump: GraphDump | None) -> None:
    """Write a complete plan, which includes the bytes that its partitioned graph saves.

    Raises `Planned` if the dump needs only the plan, and `ConfigError` if it cannot be written.
    """
    compat.trace_artifact("fxprec_plan", "json", dumps(plan))
    if dump is not None:
        dump.finish(plan)


@dataclass
class _Watch:
    dump: GraphDump | None
    texts: int = 0

    def run(self, work: Work) -> list[PassReport]:
        if self.dump is not None:
            self.dump.start()
        self.tell("joint", work, {})
        return pipeline.run(work, pipeline.pipeline_for(work.settings), self.after)

    def after(self, report: PassReport, work: Work) -> None:
        self.tell(report.name, work, report.changed)
        if self.dump is not None:
            self.dump.draw(work)

    def tell(self, name: str, work: Work, changed: dict[str, tuple[int, int]]) -> None:
        number = f"{self.texts:02}-{name}"
        self.texts += 1
        text = graph_text(work, number, changed)
        compat.trace_artifact(f"fxprec_{number}", "string", text)
        if self.dump is not None:
            self.dump.write_text(number, text)
