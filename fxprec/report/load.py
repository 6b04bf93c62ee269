"""Reading what a dump left: the plans of a file, of one graph's folder, or of a whole dump."""

from __future__ import annotations

import re
from pathlib import Path

from fxprec.errors import PlanError
from fxprec.plan import Plan


def plans_of(path: Path) -> dict[str, Plan]:
    """Return plans by graph name: of a plan file or a ``graph-N`` folder one, named ``""``.

    Raises `PlanError` for a path that does not exist, holds no dump, or a dump that was not finished.
    """
    if not path.is_dir():
        return {"": Plan.load(path)}
    if (path / "plan.json").exists():
        return {"": Plan.load(path / "plan.json")}
    folders = sorted(
        filter(Path.is_dir, path.glob("**/graph-*")), key=lambda p: [int(n) for n in re.findall(r"\d+", str(p))]
    )
    if not folders:
        if any(path.glob("00-joint.txt")):
            raise _unfinished(path)
        raise PlanError(f"{path}: holds no dump (no graph-0); give a folder that dump= or fxprec dump wrote")
    for folder in folders:
        if not (folder / "plan.json").exists():
            raise _unfinished(folder)
    return {folder.relative_to(path).as_posix(): Plan.load(folder / "plan.json") for folder in folders}


def _unfinished(folder: Path) -> PlanError:
    return PlanError(f"{folder}: has no plan.json, so this compilation did not end; dump the model again")
