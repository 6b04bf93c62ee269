"""Han et al. 2020, Figure 11: time to reduce the gradients of ResNet-50's last layers, one by one and merged."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.comm import slow_link
from benchmarks.papers import svg
from benchmarks.papers.claims import Claim, Verdict, lower, mean_and_error, together
from benchmarks.papers.found import Found, Row, number

TITLE = "Time to reduce the last layers' gradients, one by one and merged"
SOURCE = "Figure 11"
FP16, APS, TIMES = "16 bits, ms", "8 bits with APS, ms", "16 bits / APS"
MERGED, APART = "merged", "one by one, together"
PUBLISHED = {MERGED: {TIMES: 1.33}}
SMALLER = (
    "The paper's layers are reduced on 4 ranks of Gloo in place of 32 V100 on NCCL. Each rank has a network "
    "namespace behind a link of 20 Mbit/s. At this rate the wire takes the time, and not the two CPU cores."
)
DEVIATES = (
    "APS sends e5m2 with sums in float32. 16 bits are torch's own fp16 hook. A ring of 4 has 6 messages where a "
    "ring of 32 has 62, and namespaces have next to no latency. So merging has little to win. Each seed's figure "
    "is the median of 3 exchanges."
)
SEEDS = 3
HOSTS, RATE, REPEATS = 4, "20mbit", 3


def unable() -> str:
    """Why it cannot be measured here; "" where it can."""
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    return "" if is_root and shutil.which("ip") and shutil.which("tc") else "network namespaces need root and iproute2"


def run(seed: int, full: bool) -> Iterator[Row]:
    """Each layer, their sum, and all as one."""
    slow_link.tear_down(HOSTS)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rank0.json"
        try:
            slow_link.build(HOSTS, RATE)
            words = ["--seed", str(seed), "--repeats", str(REPEATS * (3 if full else 1)), "--out", str(out)]
            slow_link.launch(HOSTS, slow_link.HERE / "layers_rank.py", words)
        finally:
            slow_link.tear_down(HOSTS)
        found = json.loads(out.read_text(encoding="utf-8"))
    layers = {name: (1e3 * row["fp16"], 1e3 * row["aps"]) for name, row in found.items()}
    merged = layers.pop(MERGED)
    for name, times in layers.items():
        yield name, _cells(*times)
    yield APART, _cells(sum(a for a, _ in layers.values()), sum(b for _, b in layers.values()))
    yield MERGED, _cells(*merged)


def _cells(fp16: float, aps: float) -> dict[str, float]:
    return {FP16: fp16, APS: aps, TIMES: fp16 / aps}


def _is_faster(found: Found, row: str) -> Verdict:
    mean, error = mean_and_error(found.samples(row, TIMES))
    detail = f"{row} {number(mean)}x ± {number(2 * error)}"
    if mean - 2 * error > 1:
        return Verdict("holds", detail)
    return Verdict("fails" if mean + 2 * error < 1 else "not shown", detail)


CLAIMS = [
    Claim(
        "8 bits with APS take less time than 16 bits, for each layer and merged (paper: 1.33x)",
        lambda found: together(*(_is_faster(found, row) for row in found.rows)),
    ),
    Claim(
        "Layers take less time merged than one by one",
        lower(MERGED, APART, APS),
        "Merging saves latency, and there is next to none here. In three seeds the merged exchange took 15 %, "
        "0.2 % and 9 % longer, as exchanges differ among themselves. By the count, merging leaves out two of "
        "three exchanges: some twenty messages, one after another. At less than a millisecond each, they take "
        "below 1 % of 3.6 s.",
    ),
]


def draw(found: Found) -> str:
    """Time by layer."""
    return svg.bars({row: {c: found.mean(row, c) for c in (FP16, APS)} for row in found.rows}, "ms")
