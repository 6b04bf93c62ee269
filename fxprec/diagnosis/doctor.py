"""`doctor`: record one step, examine every stored tensor, check the prediction, and advise."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fxprec.config import Config, Settings
from fxprec.config.checks import above_zero, integer, options_of, ratio
from fxprec.config.processor import PORTABLE
from fxprec.diagnosis.advice import TOLERANCE, Advice, advise, gemms_to_hold, hold_gemms
from fxprec.diagnosis.diagnosis import Diagnosis
from fxprec.diagnosis.examine import Examined
from fxprec.diagnosis.live import Live, not_trained_yet
from fxprec.diagnosis.rows import Check, GemmRow, GroupRow, Row
from fxprec.diagnosis.subject import Subject, WithLoss
from fxprec.driver.backend import Backend
from fxprec.driver.record import Recorder
from fxprec.errors import ConfigError, FormatError
from fxprec.numerics.blocks import find
from fxprec.passes.analysis.selection import OUTERMOST

FORMATS = ("bf16", "fp16", "e4m3fn", "e5m2", "mxfp8_e4m3", "int8", "mxfp4", "int4")
RERUNS = 16
"""Groups that are re-run: half of them the worst, half the best."""
HIGH_SHARE = 0.15
"""Share of the weights of GEMMs in block formats that a recommendation keeps high (16 % in arXiv 2509.25149)."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """The doctor's own options, and the `Config` for the others."""

    config: Config
    base: Mapping[str, Any]
    """The options as given, for the recommendation."""
    formats: tuple[str, ...]
    tolerance: float
    reruns: int
    high_share: float

    @classmethod
    def of(cls, options: Mapping[str, object] | None) -> Request:
        """Read the options. Raises `ConfigError`."""
        given = {"recipe": "fp8", **options_of(options)}
        formats = _formats(given.pop("formats", FORMATS))
        tolerance = above_zero("tolerance", given.pop("tolerance", TOLERANCE), "a damage above 0, such as 0.1")
        reruns = integer("reruns", given.pop("reruns", RERUNS), least=0)
        high_share = ratio("high_share", given.pop("high_share", HIGH_SHARE))
        if high_share is None:
            raise ConfigError("high_share is None; give it a number from 0 to 1, such as 0.15")
        asked = Config.from_options(given)
        if not Settings.of(asked).rounds_anything:
            raise ConfigError(f"recipe {asked.recipe!r} holds everything in float32: nothing to diagnose; choose 'fp8'")
        config = replace(
            asked,
            lowering="eager",
            mode="default",
            gemms="high",
            promote_above=None,
            dump=None,
            dump_tensors=None,
            dump_every=None,
            dump_limit=None,
            watch_every=None,
            verify=False,
        )
        base = {name: value for name, value in given.items() if not name.startswith("dump")}
        return cls(config, base, formats, tolerance, reruns, high_share)


def _formats(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ConfigError(f"formats is {value!r}; give it a tuple of format names, such as ('e4m3fn', 'bf16')")
    try:
        return tuple(dict.fromkeys(find(v).name for v in value))
    except FormatError as error:
        raise ConfigError(f"formats: {error}") from None


def doctor(
    model: object,
    args: object,
    *,
    loss: Callable[[Any], object] | None = None,
    options: Mapping[str, object] | None = None,
    tell: Tell | None = None,
) -> Diagnosis:
    """Measure what storing each tensor of a training step low costs, and recommend options to train with.

    ``model`` is a module, ``args`` its batch: a tensor, a tuple or a dict of keywords. ``loss`` maps the output to a
    scalar; by default it is the output's own ``.loss``, or the output's mean square. ``tell`` is called with a line
    after each stage. The model is copied and does not change.

    ``options`` are those of `Config` and four more. ``formats`` are the candidates. ``tolerance`` (0.1) is the damage
    that a recommendation may do. ``reruns`` is the number of groups to re-run. ``high_share`` (0.15) applies to the
    weights whose GEMMs round operands to blocks: the share of them that a recommendation keeps high.

    To examine a running training, pass as ``model`` what fxprec compiled, or its `Backend`. The doctor then examines
    the current plan, promotions and scales. ``args`` may then be a function that runs one or a few training steps and
    may return the loss; these steps count. With a batch, nothing of the training changes. Raises `ConfigError`.
    """
    start, tell = time.perf_counter(), tell or (lambda line: None)
    live = Live.of(model, args, loss)
    if live is not None:
        name, request = live.name, Request.of(live.own_options(options))
        value, graphs, notes = recorded_live(live, request, tell)
    else:
        module, asked = not_trained_yet(model, options)
        request, subject = Request.of(asked), Subject.of(module, args, loss)
        name = subject.name
        value, graphs, notes = recorded(subject, request, tell)
    hi = Settings.of(request.config).recipe.hi
    formats = tuple(dict.fromkeys((*request.formats, hi.name)))
    examined, rows = [], list[Row]()
    for graph in graphs:
        examined.append(graph())
        rows += examined[-1].rows(formats)
        notes += _blind_spots(examined[-1])
        tell(f"graph {examined[-1].index}: {len(rows)} stored tensors in {len(formats)} formats")
    found = (g for e in examined for g in e.groups(r for r in rows if r.graph == e.index))
    groups = sorted(found, key=lambda g: (-g.damage, g.graph, g.group))
    checks = _checks(examined, rows, groups, request.reruns, tell)
    gemms = [row for e in examined for row in e.gemms()]
    advice = hold_gemms(advise(rows, hi, request.base, request.tolerance), gemms, request.high_share)
    whole = (*_whole(examined, rows, advice), *_whole_gemms(examined, gemms, request.high_share))
    tell("recommendation checked")
    return Diagnosis(
        model=name,
        loss=value,
        formats=formats,
        ranking=tuple(sorted(rows, key=lambda row: row.order)),
        groups=tuple(groups),
        gemms=tuple(sorted(gemms, key=lambda row: (-row.damage, row.graph, row.gemm))),
        checks=checks,
        whole=whole,
        spearman=spearman([c.predicted for c in checks], [c.measured for c in checks]),
        advice=advice,
        notes=tuple(dict.fromkeys(notes)),
        seconds=time.perf_counter() - start,
    )


STEPS = 3  # statistics of the first step choose the scales of gradients, and arrive in the third


def recorded(subject: Subject, request: Request, tell: Tell) -> tuple[float, list[Callable[[], Examined]], list[str]]:
    """Run a step, or a few if gradients have scales; return its loss, its training graphs, and notes.

    Raises `ConfigError` if the step does not run, or has no graph that trains.
    """
    settings, recorder = Settings.of(request.config), Recorder()
    backend = Backend(replace(request.config, cpu=request.config.cpu or PORTABLE), recorder=recorder)
    whole = _rounds_forward(settings)
    model = WithLoss(subject.fresh(), subject.loss) if whole else subject.fresh()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call = torch.compile(model, backend=backend)
        value = subject.step(call, has_loss=whole)
        tell(f"step compiled and run: loss {value:.6g}")
        for _ in range(STEPS - 1 if any(c.keeper is not None for c in backend.controllers) else 0):
            model.zero_grad(set_to_none=True)
            value = subject.step(call, has_loss=whole)
    notes = [
        str(w.message) for w in caught if issubclass(w.category, UserWarning) and "fxprec" in type(w.message).__module__
    ]
    graphs = _recorded_graphs(recorder, "model." if whole else "")
    if not graphs:
        raise ConfigError(
            f"{subject.name} has no graph that Dynamo compiled and backward reached, so nothing is stored low; see "
            "TORCH_LOGS='graph_breaks'"
        )
    return value, graphs, notes


def _rounds_forward(settings: Settings) -> bool:
    """Return whether the recorded step rounds its outputs, and so the gradient of a loss outside of the graph."""
    return settings.is_simulated or settings.recipe.operands is not None


def recorded_live(live: Live, request: Request, tell: Tell) -> tuple[float, list[Callable[[], Examined]], list[str]]:
    """Run a step of a training; return its loss (NaN if the step returned none), its graphs, and notes.

    Raises `ConfigError` if the step has no graph that trains.
    """
    value, recorder = live.record()
    tell(f"step of {live.name} run: loss {value:.6g}")
    notes = []
    if _rounds_forward(Settings.of(request.config)):
        notes.append("the loss is computed outside of the graph: its own gradient is that of the rounded step")
    graphs = _recorded_graphs(recorder, "")
    if not graphs:
        raise ConfigError(
            f"{live.name}: the step ran no graph that trains, forward and backward; give a batch of the shapes that it "
            "trains on, or a function that calls the compiled model and backward()"
        )
    return value, graphs, notes


def _recorded_graphs(recorder: Recorder, prefix: str) -> list[Callable[[], Examined]]:
    """Return, for each graph that ran forward and backward, a function that examines it."""
    graphs: list[Callable[[], Examined]] = []
    for i, (name, halves) in enumerate(recorder.graphs.items()):
        ran = all(h in halves and halves[h].args is not None for h in ("forward", "backward"))
        if ran and halves["forward"].compiled.plan is not None:
            graphs.append(partial(Examined.of, i, halves, recorder.inputs[name], prefix))
    return graphs


def _blind_spots(examined: Examined) -> list[str]:
    found = [
        f"{name} has no second derivative: damage that would pass through it is not counted"
        for name in sorted(examined.lab.undifferentiable)
    ]
    if not examined.gradients.is_finite:
        found.append("a gradient of this step is not finite in float32, so damages mean nothing; see on_nonfinite")
    return found


def _checks(
    examined: Sequence[Examined], rows: Sequence[Row], groups: Sequence[GroupRow], reruns: int, tell: Tell
) -> tuple[Check, ...]:
    """Re-run the worst and the best groups, each with it alone low."""
    chosen = (
        list(groups)
        if len(groups) <= reruns
        else [*groups[: reruns - reruns // 2], *groups[len(groups) - reruns // 2 :]]
    )
    by_graph = {e.index: e for e in examined}
    checks = []
    for group in chosen:
        members = [row for row in rows if (row.graph, row.group) == (group.graph, group.group)]
        checks.append(by_graph[group.graph].run_again(group.name, members))
    if checks:
        tell(f"{len(checks)} of {len(groups)} groups re-run to check the prediction")
    return tuple(checks)


def _whole(examined: Sequence[Examined], rows: Sequence[Row], advice: Advice) -> tuple[Check, ...]:
    """Re-run each graph as planned, and with the formats of the advice."""
    checks = []
    for e in examined:
        mine = [row for row in rows if row.graph == e.index]
        suffix = f", graph {e.index}" if len(examined) > 1 else ""
        checks.append(e.run_again(f"as planned{suffix}", mine))
        other = {rows[i].site: fmt for i, fmt in advice.stored.items() if rows[i].graph == e.index}
        checks.append(e.run_again(f"as recommended{suffix}", mine, other))
    return tuple(checks)


def _whole_gemms(examined: Sequence[Examined], rows: Sequence[GemmRow], share: float) -> Iterator[Check]:
    """Re-run each graph with all operands in blocks, and with those that the advice keeps in blocks."""
    held = gemms_to_hold(rows, share) if rows else []
    for e in examined:
        mine = [row for row in rows if row.graph == e.index]
        if mine:
            yield e.check_gemms("operands as planned", mine)
            yield e.check_gemms("operands as recommended", [r for r in mine if (r.module or OUTERMOST) not in held])


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the rank correlation; None for fewer than three pairs, or if all values of a side are equal."""
    if len(a) < 3 or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic)
