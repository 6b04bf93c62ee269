"""Read what a dump wrote: the plans of a file, of one graph's folder or of a whole dump, and lines of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fxprec.errors import PlanError
from fxprec.plan import Plan
from fxprec.plan.files import read_entry
from fxprec.plan.reading import Entry, Reader
from fxprec.runtime.aps import link_plan

MAX_LINE = 2**24  # characters of a line of statistics or of a tensor's facts
_GIVE = "give a folder that dump= or fxprec dump wrote"


def plans_of(path: Path) -> dict[str, Plan]:
    """Return plans by graph name. A plan file or a ``graph-N`` folder has one, named ``""``.

    Raises `PlanError` for a path that does not exist, cannot be searched, has no dump, or has an unfinished one.
    """
    if not path.is_dir():
        return {"": Plan.load(path)}
    if (path / "plan.json").exists():
        return {"": Plan.load(path / "plan.json")}
    try:
        found = [p for p in path.glob("**/graph-*") if p.is_dir()]
    except OSError as error:  # a folder was removed while it was read, as those of processes in /proc
        raise PlanError(f"{path}: cannot be searched ({error.strerror}); {_GIVE}") from error
    folders = sorted(found, key=lambda p: [int(n) for n in re.findall(r"\d+", str(p))])
    if not folders:
        if (path / "00-joint.txt").exists():
            raise _unfinished(path)
        raise PlanError(f"{path}: holds no dump (no graph-0); {_GIVE}")
    for folder in folders:
        if not (folder / "plan.json").exists():
            raise _unfinished(folder)
    return {folder.relative_to(path).as_posix(): Plan.load(folder / "plan.json") for folder in folders}


def is_link_plan(path: Path) -> bool:
    """Return whether a path is the plan file of a link. Raises `PlanError` for a file that is not JSON."""
    if path.is_dir():
        return False
    try:
        entry = read_entry(path)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    return link_plan.is_link_plan(entry)


def json_lines(path: Path, checked: Reader, what: str, again: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file as ``checked`` returns them; none without a file. A half-written last line is skipped.

    Raises `PlanError` for a line that is not a line of ``what``: one for which ``checked`` raises `PlanError`.
    """
    if not path.is_file():
        return
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE), ""), start=1):
                if not line.endswith("\n") and len(line) < MAX_LINE:
                    return
                yield _checked(line, checked, f"{path}: line {number} is not a line of {what}; {again}")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read: {error}; {again}") from None


def _checked(line: str, checked: Reader, refusal: str) -> Any:
    try:
        return checked(Entry(json.loads(line)))
    except (ValueError, RecursionError):
        raise PlanError(refusal) from None


def _unfinished(folder: Path) -> PlanError:
    return PlanError(f"{folder}: has no plan.json, so this compilation did not end; dump the model again")
