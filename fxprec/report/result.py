"""Write a result for people and for programs: an HTML page, and the same as JSON beside it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from fxprec.config import policy_name
from fxprec.errors import writing


def plain(value: object) -> Any:
    """Return JSON data: numbers that are not finite as strings, dataclasses as dicts, functions by their names."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if callable(value):
        return policy_name(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_result(folder: str | Path, name: str, data: Mapping[str, object], page: str) -> Path:
    """Write ``name.json`` and ``name.html`` into ``folder``; create it; return the page. Raises `ConfigError`."""
    place = Path(folder)
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
        text = json.dumps(data, indent=1, allow_nan=False)
        (place / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        (place / f"{name}.html").write_text(page, encoding="utf-8")
    return place / f"{name}.html"
