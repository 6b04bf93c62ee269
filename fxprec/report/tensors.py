"""Dump tensors on request (``dump_tensors``): one JSON line each in ``tensors.jsonl``, values in safetensors files.

A line gives the tensor's place in the model, a hash of its bytes and its elements by exponent of two. It also gives how
many elements over- or underflow in the format in which the tensor is stored, or would be stored.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from fxprec.numerics.blocks import BlockFormat, find
from fxprec.numerics.codec import lost
from fxprec.numerics.rounding import quantize
from fxprec.numerics.rows import MAGNITUDE, format_row
from fxprec.plan.reading import Entry, count, each, exponent, fields_of, finite, number, or_one_of, text
from fxprec.report import safetensors
from fxprec.report.load import json_lines
from fxprec.report.result import plain

FILE = "tensors.jsonl"
FOLDER = "tensors"
UNDERFLOWS = ".underflows"
"""Suffix of a tensor's name in a file, for a bool tensor that is true where an element underflows."""
_SERIES = 200  # points of the sparkline
_SHOWN = 8  # positions of elements that underflow


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A tensor's place in the model, and the format in which it is stored."""

    tensor: str
    kind: str
    module: str
    source: str
    site: int | None
    """Id of the plan's site; None for a tensor without a chosen precision, or one that is not stored."""
    format: str
    """Format of the stored tensor; the recipe's low format for a tensor that is not stored."""
    scale_exponent: int
    """The tensor is multiplied by 2 to this power before it is stored."""

    @property
    def name(self) -> str:
        """Return the tensor's name in its file."""
        return f"{self.tensor}:{self.kind}"


@dataclass(frozen=True)
class Dumped:
    """A tensor that is to be written to a file."""

    origin: Origin
    value: Tensor
    kept: Tensor
    """The values that are stored, or would be: the tensor, perhaps minus its mean (docs/passes.md, store-centred)."""


def facts(dumped: Dumped) -> tuple[dict[str, Any], Tensor]:
    """Return the numbers for a tensor's line, and which elements underflow (bool, shape of the value)."""
    x, origin = dumped.value, dumped.origin
    wide = x.detach().float()
    over, under = _lost(dumped.kept.detach().float() * 2.0**origin.scale_exponent, origin.format)
    under = under.view(x.shape)
    finite = wide[torch.isfinite(wide)]
    at = torch.nonzero(under.reshape(-1)).reshape(-1)[:_SHOWN]
    numbers = {
        "shape": list(x.shape),
        "dtype": str(x.dtype).removeprefix("torch."),
        "elements": x.numel(),
        "hash": hashlib.sha256(safetensors.bytes_of(x)).hexdigest()[:32],
        "zeros": int((wide == 0).sum()),
        "nonfinite": wide.numel() - finite.numel(),
        "amax": plain(float(wide.abs().max())) if wide.numel() else 0.0,
        "norm": plain(float(finite.double().norm())),
        "overflow": int(over.sum()),
        "underflow": int(under.sum()),
        "underflows_at": at.tolist(),
        "exponents": _exponents(finite),
        "range": _range(origin),
    }
    return numbers, under


def _lost(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return which elements overflow and which underflow; in a block format none overflow, since the scale adapts."""
    fmt = find(name)
    if isinstance(fmt, BlockFormat):
        read = quantize(x, fmt)
        return torch.zeros_like(x, dtype=torch.bool), (read == 0) & (x != 0)
    return lost(x.contiguous().view(torch.int32) & MAGNITUDE, format_row(fmt))


def _exponents(x: Tensor) -> dict[str, object]:
    """Count non-zero elements by exponent of two, from ``first`` on."""
    exponents = torch.frexp(x[x != 0])[1].to(torch.int64) - 1
    if not exponents.numel():
        return {"first": 0, "counts": []}
    first = int(exponents.min())
    return {"first": first, "counts": torch.bincount(exponents - first).tolist()}


def _range(origin: Origin) -> list[float] | None:
    """Return log2 of the format's smallest and largest magnitude, without the scale."""
    fmt = find(origin.format)
    if isinstance(fmt, BlockFormat):
        return None
    ends = (fmt.smallest_subnormal, fmt.largest)
    return [round(math.log2(end) - origin.scale_exponent, 2) for end in ends]


class TensorFolder:
    """The tensor files of one graph, with at most ``limit`` bytes of tensors in all."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.left = path, limit

    def write(self, step: int, half: str, tensors: Sequence[Dumped]) -> tuple[str, ...]:
        """Append the lines of one half of a step; return the tensors beyond the limit, by name. Raises OSError."""
        file = f"{FOLDER}/{step:07}-{half}.safetensors"
        kept, lines, left_out = dict[str, Tensor](), list[str](), list[str]()
        for dumped in tensors:
            origin, x = dumped.origin, dumped.value
            numbers, under = facts(dumped)
            size = x.numel() * x.element_size() + (under.numel() if numbers["underflow"] else 0)
            fits = size <= self.left
            if fits:
                self.left -= size
                kept[origin.name] = x
                kept |= {origin.name + UNDERFLOWS: under} if numbers["underflow"] else {}
            else:
                left_out.append(origin.name)
            place = {"step": step, "half": half, "file": file if fits else None}
            lines.append(json.dumps(place | asdict(origin) | numbers) + "\n")
        if kept:
            (self.path / FOLDER).mkdir(parents=True, exist_ok=True)
            safetensors.save(self.path / file, kept, {"step": str(step), "half": half})
        with (self.path / FILE).open("a", encoding="utf-8") as index:
            index.write("".join(lines))
        return tuple(left_out)


def read_tensors(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of ``tensors.jsonl`` in a folder; none without a file. A half-written last line is skipped.

    Raises `PlanError` for a line that fxprec cannot have written.
    """
    return json_lines(path / FILE, _LINE, "dump_tensors", "train with dump_tensors again")


def _file(entry: Entry) -> str:
    """Read the path of a file beside the lines."""
    found = PurePosixPath(text(entry))
    if found.is_absolute() or ".." in found.parts:
        raise entry.wrong("a path below the folder")
    return str(found)


_LINE = fields_of(
    {
        **dict.fromkeys(("step", "elements", "zeros", "overflow", "underflow"), count),
        **dict.fromkeys(("tensor", "kind", "module", "source", "hash", "format", "dtype", "half"), text),
        **dict.fromkeys(("amax", "norm"), number),
        "site": or_one_of([None], count),
        "scale_exponent": exponent,
        "underflows_at": each(count),
        "exponents": fields_of({"first": exponent, "counts": each(count)}),
        "range": or_one_of([None], each(finite)),
        "file": or_one_of([None], _file),
    },
    unread=None,
)


def latest(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for a page, the latest line of each tensor, with the share that underflowed in each written step."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["tensor"], row["kind"]), []).append(row)
    return [_for_page(lines) for lines in found.values()]


def _for_page(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    last = lines[-1]
    same = ("tensor", "kind", "module", "step", "format", "elements", "zeros", "underflow", "overflow", "file")
    return {name: last[name] for name in (*same, "exponents", "range")} | {
        "amax": plain(last["amax"]),
        "stored": last["site"] is not None,
        "scale": last["scale_exponent"],
        "at": last["underflows_at"],
        "series": [round(row["underflow"] / max(row["elements"], 1), 5) for row in lines[-_SERIES:]],
    }
