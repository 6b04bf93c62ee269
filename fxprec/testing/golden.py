"""Golden files: the plan, exactly, and statistics with the tolerances at which they were written."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from fxprec.config import Config
from fxprec.driver.backend import Backend
from fxprec.errors import FxprecError, GoldenError
from fxprec.plan import Plan, files
from fxprec.report.compare import differences as plan_differences
from fxprec.testing.case import Compiled
from fxprec.testing.finding import Finding, Place
from fxprec.testing.measure import SKETCH, Measured

SCHEMA = 1
# Other processors and thread counts sum in another order, which changes a value by about 2^-23. This is 32 times as
# much, so that values that may round the other way there do so here too. The spread over JITTERS runs is doubled.
JITTER = 2.0**-18
JITTERS = 6
# If one of 1,000 numbers rounds the other way in 8 bits, a sketch moves by up to 0.12 / sqrt(1000) of its scale. The
# jittered runs may not contain such a number.
SKETCH_FLOOR = 5e-3
MAX_BYTES = 64 * 2**20
_INPUTS = (
    "the inputs changed since the golden file was written, so its numbers do not tell whether the code did; draw the "
    "inputs that were drawn then, or rewrite the file with --numerics-update"
)
_REWRITE = "rewrite it with --numerics-update"


@dataclass(frozen=True)
class Number:
    """A statistic; on another machine it may differ by ``tolerance``."""

    value: float
    tolerance: float


@dataclass(frozen=True)
class Entry:
    """The statistics of one tensor or one cast."""

    name: str
    numbers: Mapping[str, Number]
    place: Place = field(default_factory=Place)


@dataclass(frozen=True)
class Golden:
    """The measurements of one check."""

    options: Mapping[str, Any]
    plans: tuple[Plan, ...]
    entries: tuple[Entry, ...]
    inputs: str = ""
    """Hash of the example inputs; "" in files of earlier versions."""
    torch: str = field(default_factory=lambda: metadata.version("torch").partition("+")[0])


def take(config: Config, backend: Backend, tensors: Iterable[Measured], inputs: str) -> Golden:
    """Return the golden of a check, with the smallest tolerances."""
    options = {k: v for k, v in config.to_dict().items() if k not in ("dump", "plan", "lowering")}
    plans = backend.plans
    entries = [*map(_tensor_entry, tensors), *_cast_entries(backend)]
    return Golden(json.loads(json.dumps(options)), plans, tuple(entries), inputs)


def _tensor_entry(m: Measured) -> Entry:
    numbers = {"error": Number(m.error, 0.05 * m.error + 1e-4), "gain": Number(m.gain, 1e-3)}
    if m.numel > 1:
        numbers |= {f"sketch{i}": Number(m.sketch[i], SKETCH_FLOOR) for i in range(SKETCH)}
    return Entry(m.name, numbers)


def _cast_entries(backend: Backend) -> Iterator[Entry]:
    sites = [(graph, plan) for graph, plan in enumerate(backend.all_plans)]
    by_graph = {graph: plan for graph, plan in sites if plan is not None}
    for i, row in enumerate(backend.stats()):
        if row["amax"] is None:
            continue
        site = by_graph[row["graph"]].sites[row["site"]]
        one = 1 / max(site.elements, 1)
        numbers = {
            "amax": Number(row["amax"], 0.01 * abs(row["amax"])),
            "overflow_ratio": Number(row["overflow_ratio"], 1e-3 + one),
            "underflow_ratio": Number(
                math.nan if row["underflow_ratio"] is None else row["underflow_ratio"], 1e-3 + one
            ),
            "scale_exponent": Number(float(row["scale_exponent"]), 1.0),
        }
        name = f"{site.tensor} {site.kind} (graph {row['graph']}, cast {i})"
        yield Entry(name, numbers, Place(site.module, site.source))


def with_tolerances(golden: Golden, compiled: Compiled, measured: Callable[[int], list[Measured]]) -> Golden:
    """Widen each tolerance by twice the largest change of such numbers when weights and inputs are jittered.

    A value that rounds the other way changes every tensor after it, so tensors share the largest spread.
    """
    compiled.backend.stop_promoting()
    spread: dict[str, float] = {}
    for seed in range(JITTERS):
        with compiled.jittered(JITTER, seed):
            again = [*map(_tensor_entry, measured(1)), *_cast_entries(compiled.backend)]
        for entry, other in zip(golden.entries, again, strict=True):
            for name, number in entry.numbers.items():
                moved = abs(other.numbers[name].value - number.value)
                key = _pool(entry, name)
                spread[key] = max(spread.get(key, 0.0), moved if math.isfinite(moved) else 0.0)

    def widened(entry: Entry) -> Entry:
        numbers = entry.numbers.items()
        return replace(
            entry, numbers={n: replace(x, tolerance=x.tolerance + 2 * spread[_pool(entry, n)]) for n, x in numbers}
        )

    return replace(golden, entries=tuple(map(widened, golden.entries)))


def _pool(entry: Entry, number: str) -> str:
    """Return a key for numbers that share a spread: numbers of casts and scalars have their own units."""
    is_tensor = "sketch0" in entry.numbers
    return number.rstrip("0123456789") if is_tensor else f"{entry.name} {number}"


def differences(stored: Golden, now: Golden, places: Mapping[str, Place]) -> list[Finding]:
    """Return the changes since the file was written: options, plan, and statistics beyond their tolerance."""
    numbers = [*_statistics(stored, now, places)]
    if numbers and stored.inputs not in ("", now.inputs):  # other last bits of the inputs alone change no number
        numbers = [Finding("(inputs)", Place(), f"{_INPUTS}; {len(numbers)} numbers differ", math.inf)]
    found = [*_options(stored, now), *_plans(stored, now), *numbers]
    if found and stored.torch != now.torch:
        text = f"the golden file was written with torch {stored.torch}, this is {now.torch}"
        found.append(Finding("(note)", Place(), text, 0.0))
    return found


def _options(stored: Golden, now: Golden) -> Iterator[Finding]:
    for name in {**stored.options, **now.options}:
        before, after = stored.options.get(name), now.options.get(name)
        if before != after:
            yield Finding("(options)", Place(), f"{name} was {before!r}, is {after!r}", math.inf)


def _plans(stored: Golden, now: Golden) -> Iterator[Finding]:
    if len(stored.plans) != len(now.plans):
        text = f"{len(stored.plans)} compiled graphs in the golden file, {len(now.plans)} here"
        yield Finding("(plan)", Place(), text, 1e12)
    for graph, (before, after) in enumerate(zip(stored.plans, now.plans, strict=False)):
        for i, line in enumerate(plan_differences(_without_lines(before), _without_lines(after))):
            yield Finding("(plan)", Place(), f"graph {graph}: {line}", 1e12 / (i + 1))


def _without_lines(plan: Plan) -> Plan:
    """Return the plan without source lines, which change when the file is edited above the model."""
    return replace(plan, sites=tuple(replace(site, source="") for site in plan.sites))


def _statistics(stored: Golden, now: Golden, places: Mapping[str, Place]) -> Iterator[Finding]:
    before, after = ({e.name: e for e in g.entries} for g in (stored, now))
    for name in {**before, **after}:
        here = after.get(name) or before[name]
        place = places.get(name, here.place)
        if name not in before or name not in after:
            yield Finding(name, place, f"only in {'this run' if name in after else 'the golden file'}", 1e6)
            continue
        off = sorted(_off(before[name], after[name]), reverse=True)
        if off:
            more = f" (and {len(off) - 1} more)" if len(off) > 1 else ""
            yield Finding(name, place, off[0][1] + more, off[0][0])


def _off(before: Entry, after: Entry) -> Iterator[tuple[float, str]]:
    """Yield, for each number outside its tolerance, by how many tolerances it is off, and a phrase."""
    for name in {**before.numbers, **after.numbers}:
        old, new = before.numbers.get(name), after.numbers.get(name)
        if old is None or new is None:
            yield math.inf, f"{name}: only in {'this run' if old is None else 'the golden file'}"
            continue
        if old.value == new.value or (math.isnan(old.value) and math.isnan(new.value)):
            continue
        moved = abs(new.value - old.value)
        if not moved <= old.tolerance:
            times = moved / old.tolerance if old.tolerance and math.isfinite(moved) else math.inf
            yield times, f"{name} was {old.value:.6g} +- {old.tolerance:.2g}, is {new.value:.6g}"


def save(golden: Golden, path: Path) -> None:
    """Write the file, one row per line. Raises `GoldenError`."""
    write_text(path, dumps(golden))


def write_text(path: Path, text: str) -> None:
    """Write a golden file, all or nothing. Raises `GoldenError`."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise GoldenError(f"{path}: cannot be written: {error.strerror}; make its folder writable") from None


def dumps(golden: Golden) -> str:
    """Return the text of a golden file."""
    head = {"schema": SCHEMA, "fxprec": metadata.version("fxprec"), "torch": golden.torch, "options": golden.options}
    head["inputs"] = golden.inputs
    lines = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    entries = [json.dumps({"name": e.name, "numbers": _numbers(e)}) for e in golden.entries]
    lines.append('"statistics": [\n  ' + ",\n  ".join(entries) + "\n ]")
    lines.append('"plans": [' + ", ".join(files.dumps(_without_lines(p)).strip() for p in golden.plans) + "]")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _numbers(entry: Entry) -> dict[str, list[float | str]]:
    def rounded(x: float, digits: int) -> float | str:
        return float(f"{x:.{digits}g}") if math.isfinite(x) else str(x)

    return {n: [rounded(x.value, 7), rounded(x.tolerance, 3)] for n, x in entry.numbers.items()}


def load(path: Path) -> Golden:
    """Read a golden file as plain data. Raises `GoldenError` for another version, or for data not written by `save`."""
    with reading(path):
        data = read_json(path, SCHEMA)
        options = _typed(data, "options", dict)
        plans = tuple(Plan.from_dict(plan) for plan in _typed(data, "plans", list))
        entries = tuple(_entry(row, i) for i, row in enumerate(_typed(data, "statistics", list)))
        inputs = _typed({"inputs": "", **data}, "inputs", str)
        return Golden(options, plans, entries, inputs, _typed(data, "torch", str))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Replace any error while a file is read. Raises `GoldenError` with the file's name instead."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise GoldenError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}; {_REWRITE}") from None
    except (ValueError, RecursionError) as error:
        cause = str(error) if isinstance(error, FxprecError) else f"is not JSON ({error})"
        raise GoldenError(f"{path}: {cause}; {_REWRITE}") from None


def read_json(path: Path, schema: int) -> dict[str, Any]:
    """Return the object in a golden file of that schema. Raises `GoldenError`, and what `json` raises."""
    if path.stat().st_size > MAX_BYTES:
        raise GoldenError(f"is larger than {MAX_BYTES >> 20} MiB")
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise GoldenError(f"is a {type(data).__name__}, not a golden file of the numerics kit")
    if data.get("schema") != schema:
        raise GoldenError(f"has schema {data.get('schema')!r:.60}, and this fxprec reads {schema}")
    return data


def _typed(data: object, key: str, kind: type, where: str = "") -> Any:
    if not isinstance(data, dict) or not isinstance(data.get(key), kind):
        raise GoldenError(f"{where}{key} is missing or not a {kind.__name__}")
    return data[key]


def _entry(row: object, index: int) -> Entry:
    where = f"statistics[{index}]."
    numbers = _typed(row, "numbers", dict, where)
    return Entry(_typed(row, "name", str, where), {n: _number(x, f"{where}numbers.{n}") for n, x in numbers.items()})


def _number(pair: object, where: str) -> Number:
    if isinstance(pair, list) and len(pair) == 2:
        value, tolerance = (_float(x) for x in pair)
        if value is not None and tolerance is not None and tolerance >= 0:
            return Number(value, tolerance)
    raise GoldenError(f"{where} is {pair!r:.60}, and must be [value, tolerance]")


def _float(x: object) -> float | None:
    if isinstance(x, str):
        return float(x) if x in ("inf", "-inf", "nan") else None
    return float(x) if isinstance(x, int | float) and not isinstance(x, bool) else None
