"""Read and write plan files: plain JSON with one table row per line, read as untrusted input, written atomically."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fxprec.config.operands import PRODUCTS
from fxprec.errors import FxprecError, PlanError
from fxprec.plan.entries import read_plan
from fxprec.plan.reading import Entry
from fxprec.plan.rows import PeakBytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from fxprec.plan.plan import Plan

SCHEMA = 1
MAX_BYTES = 64 * 2**20
MAX_VALUES = 4_000_000  # 64 MiB of sites have 3.3 million values; 64 MiB of zeros would have 32 million and take 1 GB
_TABLES = ("gemms", "groups", "sites", "saved")


def to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON data: fields of the whole plan first, then the tables.

    Some keys are optional. ``grouping`` is omitted if it is the default, ``reads`` in storage ``simulate``. A site's
    ``why``, ``unread``, ``saved_as``, ``form`` and a GEMM's block formats are omitted if empty. ``peak_bytes`` and
    ``way`` need a peak budget, ``whole_step`` a step budget, ``lowering`` a choice, ``saved`` a partitioned graph.
    """
    head = {
        "schema": plan.schema,
        "fxprec": plan.fxprec,
        "torch": plan.torch,
        **({"model": plan.model} if plan.model else {}),
        "recipe": plan.recipe.to_dict(),
        "storage": plan.storage,
        "policy": plan.policy,
        **({} if plan.grouping == "execution" else {"grouping": plan.grouping}),
        "requested_low_ratio": plan.requested_low_ratio,
        "activation_budget": plan.activation_budget,
        "achieved_low_ratio": plan.achieved_low_ratio,
        "bit_ratio": plan.bit_ratio,
        "gap": plan.gap,
        "total_elements": plan.total_elements,
        "notes": list(plan.notes),
        **({} if plan.peak_bytes is None else {"peak_bytes": _peak(plan.peak_bytes)}),
        **({} if plan.whole_step is None else {"whole_step": _given(asdict(plan.whole_step))}),
        **({} if plan.lowering is None else {"lowering": _given(asdict(plan.lowering))}),
        "saved_bytes": None if plan.saved_bytes is None else asdict(plan.saved_bytes),
    }
    sites = [_row(row, ("why", "unread", "saved_as", "form", "way")) for row in plan.sites]
    for site in sites if plan.storage == "simulate" else ():
        del site["reads"]
    gemms = [_row(row, (*PRODUCTS, "operands_why")) for row in plan.gemms]
    tables = {"gemms": gemms, "groups": [_row(row) for row in plan.groups], "sites": sites}
    return head | tables | ({"saved": [_row(row, ("site", "on_host")) for row in plan.saved]} if plan.saved else {})


def _row(row: DataclassInstance, optional: Collection[str] = ()) -> dict[str, object]:
    """Return a row as data, without those of its ``optional`` fields that are None, False or empty."""
    data = _with_lists(asdict(row)).items()
    return {k: v for k, v in data if k not in optional or not (v is None or v is False or v in ("", []))}


def _with_lists(value: object) -> Any:
    """Return data with lists in place of tuples, as a file that is read has them."""
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, tuple | list) else value


def _peak(row: PeakBytes) -> dict[str, object]:
    """Return the peak as data, without empty fields and without the fields for several graphs if there is one."""
    left_out = {"graphs", "beside"} if row.graphs == 1 else set()
    left_out |= set() if row.reserved else {"reserved"}
    data = _row(row, ("points", "compiled_live", "offloaded"))
    return {key: value for key, value in data.items() if key not in left_out}


def _given(data: dict[str, object]) -> dict[str, object]:
    """Return data without fields that are None or empty text."""
    found = {key: _given(value) if isinstance(value, dict) else value for key, value in data.items()}
    return {key: value for key, value in found.items() if value not in (None, "")}


def dumps(plan: Plan) -> str:
    """Return the text of a plan file; equal plans give equal text."""
    data = to_dict(plan)
    lines = [f" {_compact(key)}: {_table(value) if key in _TABLES else _compact(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _table(rows: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(f"  {_compact(row)}" for row in rows) + "\n ]" if rows else "[]"


def write(content: str, path: str | os.PathLike[str]) -> None:
    """Write the text of a plan file atomically. Raises `PlanError` if the path cannot be written."""
    target = Path(path).resolve()  # of a symbolic link, replace the target and keep the link
    beside = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}")
    try:
        _write_through(content.encode("ascii"), beside, target)
    except OSError as error:
        cause = error.strerror or str(error)
        raise PlanError(f"{os.fspath(path)}: cannot write the plan: {cause}; choose a writable file path") from None


def _write_through(content: bytes, beside: Path, target: Path) -> None:
    """Write ``content`` to the file ``beside``, then rename it to ``target``."""
    try:
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], kind: type[Plan]) -> Plan:
    """Read a plan file. Raises `PlanError` naming the file, the entry, the cause and a remedy."""
    name = os.fsdecode(path)
    try:
        return read_checked(read_entry(name), kind)
    except FxprecError as error:
        raise PlanError(f"{name}: {error}") from None


def read_entry(path: str | os.PathLike[str]) -> Entry:
    """Return the JSON data of a plan file. Raises `PlanError` naming the cause and a remedy."""
    return Entry(_from_bytes(_read(os.fsdecode(path))))


def read_checked(entry: Entry, kind: type[Plan]) -> Plan:
    """Check the schema version and return the plan of an entry of larger data. Raises `PlanError` naming the entry."""
    _check_schema(entry)
    return read_plan(entry, kind)


def _read(name: str) -> bytes:
    """Return the file's bytes. Refuse a file that is not regular, and read no more than `MAX_BYTES` and one byte."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not block
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise PlanError("is not a regular file; give the path of a plan file, such as plan.save() writes")
            with open(handle, "rb", closefd=False) as file:
                content = file.read(MAX_BYTES + 1)
        finally:
            os.close(handle)
    except PlanError:
        raise
    except (OSError, ValueError) as error:
        cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise PlanError(f"cannot be read: {cause}; give the path of a plan file") from None
    if len(content) > MAX_BYTES:
        raise PlanError(
            f"is larger than {MAX_BYTES // 2**20} MiB, so it is not a plan file; give one that plan.save() wrote"
        )
    return content


def _from_bytes(content: bytes) -> object:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"is not UTF-8 (byte {error.start}); give a plan file, such as plan.save() writes") from None
    if text.count(",") + text.count("[") + text.count("{") > MAX_VALUES:
        raise PlanError(
            f"holds more than {MAX_VALUES} values, so it is not a plan file; give one that plan.save() wrote"
        )
    return _parse(text)


def _parse(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_int=_int, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise PlanError(
            f"is not valid JSON at {where}: {error.msg}; the file may be truncated; write it again"
        ) from None
    except RecursionError:
        raise PlanError("is nested too deeply for a plan file; give one that plan.save() wrote") from None


def _refuse_constant(text: str) -> NoReturn:
    raise PlanError(f"holds {text}, which is not a JSON number; write a finite number or null")


def _int(text: str) -> int:
    if len(text) > 19:  # 2**63 has 19 digits
        raise PlanError(f"holds an integer of {len(text)} digits; the largest allowed is 2**63 - 1")
    return int(text)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise PlanError(f"holds the key {_short(twice)} twice in one object; remove one")
    return found


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _check_schema(entry: Entry) -> None:
    at = entry.get("schema")
    found = at.value
    if type(found) is not int or found != SCHEMA:
        raise PlanError(
            f"{at.path}: is {found!r:.60}, and this fxprec reads {SCHEMA}; "
            "plan again with this version, or install the fxprec that wrote the file"
        )
