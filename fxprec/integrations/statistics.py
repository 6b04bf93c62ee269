"""Log the statistics of a step to TensorBoard, Weights & Biases, Lightning's loggers, or a CSV file."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fxprec.driver.backend import Backend
from fxprec.errors import ConfigError, writing
from fxprec.integrations.alerts import NUMBERS, Alert, alerts_of, note_alerts
from fxprec.integrations.backends import backends_in
from fxprec.plan.plan import Plan, saved_low_share
from fxprec.plan.shown import fullest_peak

COLUMNS = (
    "step", "model", "graph", "site", "tensor", "module", "kind", "format", "promoted_at", "amax", "overflow_ratio",
    "underflow_ratio", "scale_exponent",
)  # fmt: skip
_TAKES = ("add_scalar", "log_metrics", "log")  # of TensorBoard, Lightning, W&B


def summary(model: object) -> dict[str, float]:
    """Return a few numbers on a model's latest step, for a line of a log, without waiting for the device.

    They are: the largest overflow and underflow ratios over all tensors; the share of all elements that the policy made
    low, averaged over steps and backends; the bytes that a step saves for backward, their share in fewer than 16 bits,
    and the bytes of the same tensors in bf16; under a peak budget, the peak of the graph that is nearest to its part of
    the budget, and that part; the counts of promoted tensors and skipped steps.
    """
    backends = backends_in(model)
    return _summary(backends, _rows(backends))


def _rows(backends: Mapping[str, Backend]) -> list[dict[str, object]]:
    return [{"model": name, **row} for name, backend in backends.items() for row in backend.stats(wait=False)]


def _summary(backends: Mapping[str, Backend], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    plans = [plan for backend in backends.values() for plan in backend.latest_plans]  # of training graphs only
    saved = [plan.saved_bytes for plan in plans if plan.saved_bytes is not None]
    demoted = [backend.mean_demoted_ratio for backend in backends.values()]
    return {
        "fxprec/overflow_ratio": max((row["overflow_ratio"] or 0.0 for row in rows), default=0.0),
        "fxprec/underflow_ratio": max((row["underflow_ratio"] or 0.0 for row in rows), default=0.0),
        "fxprec/mean_demoted_ratio": statistics.fmean(demoted or [0.0]),
        "fxprec/saved_low_share": saved_low_share(plans),
        "fxprec/saved_bytes": sum(count.planned for count in saved),
        "fxprec/saved_bytes_in_bf16": sum(count.bf16 for count in saved),
        **_peak(plans),
        "fxprec/promoted": sum(len(plan.promoted) for plan in plans),
        "fxprec/skipped_steps": sum(backend.skipped_steps for backend in backends.values()),
    }


def _peak(plans: Sequence[Plan]) -> dict[str, float]:
    peak = fullest_peak(plans)
    return {} if peak is None else {"fxprec/peak_bytes": peak.held, "fxprec/peak_budget": peak.room}


def log_statistics(
    model: object, to: object, step: int, *, every_tensor: bool = False, alerts: Iterable[object] = ()
) -> None:
    """Log the known statistics of the latest step, without waiting for the device.

    ``to``: TensorBoard's ``SummaryWriter``, a W&B run, a Lightning logger, or the path of a CSV file. One line per cast
    (`COLUMNS`) is appended to a file. The other targets get the numbers of `summary` and, with ``every_tensor``, each
    tensor's amax, overflow and underflow ratio and scale exponent. ``alerts`` are those of `log_to`; the number of
    tensors beyond a limit is logged too. Raises `ConfigError` for another ``to``, and for a model that fxprec did not
    compile.
    """
    check_target(to)
    log_rows(backends_in(model), to, step, every_tensor=every_tensor, alerts=alerts_of(alerts))


def log_rows(
    backends: Mapping[str, Backend], to: object, step: int, *, every_tensor: bool, alerts: Sequence[Alert]
) -> None:
    """Log the statistics of backends, given by module name, as `log_statistics` does."""
    rows = _rows(backends)
    firing = sum(note_alerts(b, [row for row in rows if row["model"] == n], alerts) for n, b in backends.items())
    if to is None:
        return
    if isinstance(to, str | Path):
        _append(Path(to), rows, step)
        return
    values = _summary(backends, rows) | ({"fxprec/alerts": firing} if alerts else {})
    if every_tensor:
        values |= _by_tensor(rows)
    _send(values, to, step)


def _append(path: Path, rows: Iterable[Mapping[str, object]], step: int) -> None:
    with writing(path, "path"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows({**row, "step": step} for row in rows)


def _by_tensor(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return values by ``fxprec/amax/graph0/<tensor>/<kind>`` and so on; the last of several casts of a tensor wins."""
    values: dict[str, float] = {}
    for row in rows:
        name = "/".join(filter(None, (row["model"], f"graph{row['graph']}", row["tensor"], row["kind"])))
        known = {key: row[key] for key in NUMBERS if row[key] is not None and math.isfinite(row[key])}
        values |= {f"fxprec/{key}/{name}": value for key, value in known.items()}
    return values


def _send(values: Mapping[str, float], to: Any, step: int) -> None:
    if hasattr(to, "add_scalar"):  # TensorBoard
        for name, value in values.items():
            to.add_scalar(name, value, step)
    elif hasattr(to, "log_metrics"):  # Lightning
        to.log_metrics(dict(values), step=step)
    else:  # W&B, whose own step can only grow, so fxprec's step is logged as a value
        to.log({**values, "fxprec/step": step})


def check_target(to: object) -> None:
    """Raise `ConfigError` for a target that cannot take statistics. None is allowed, and logs nothing."""
    if to is not None and not isinstance(to, str | Path) and not any(hasattr(to, name) for name in _TAKES):
        raise ConfigError(
            f"to={type(to).__name__} takes no statistics; give TensorBoard's SummaryWriter, a W&B run, a Lightning "
            "logger or the path of a CSV file"
        )
