"""Planted faults, and predicted ranks against real ablations.

    python -m benchmarks.doctor faults [--few]
    python -m benchmarks.doctor ranks
    python -m benchmarks.doctor time
    python -m benchmarks.doctor recommended
    python -m benchmarks.doctor callbacks

``faults`` plants 40 faults into six networks, one at a time, and asks the doctor which tensor is guilty. ``ranks``
compares predicted with measured damage of every stored tensor of four networks in eight formats. ``time`` examines a
transformer of twelve layers. ``recommended`` trains the recommended plan against policy ``size`` at equal bytes.
``callbacks`` measures what `fxprec.log_to` adds to a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fxprec
from benchmarks import machine
from benchmarks.doctor import callbacks, faults, recommended
from benchmarks.doctor.faults import Fault
from benchmarks.doctor.networks import NETWORKS, Language
from fxprec.diagnosis.doctor import spearman

FORMATS = ("bf16", "fp16", "1-6-9", "e4m3fn", "e5m2", "1-4-3+4", "1-5-2", "1-2-1")
TRAINED = 300  # steps; before any, all layers are alike and ranks are those of chance
RANKED = ("language", "softmax", "batch norm", "mixer")
SITES = {"language": 5, "softmax": 5, "plain": 4, "batch norm": 3, "group norm": 4, "mixer": 4}


def all_faults() -> Iterator[Fault]:
    """Yield the 40: each layer and softmax named, and stored tensors spread over each network."""
    for name, network in NETWORKS.items():
        yield from (faults.scaled_layer(name, module) for module in network.loud)
        yield from (faults.scaled_weights(name, module) for module in network.loud_weights)
        yield from (faults.hot_softmax(name, linear, module) for linear, module in network.softmax.items())
        sites = faults.harmful(network)
        makers = (faults.narrow, faults.wrong_scale, faults.swapped_cast)
        count = SITES[name]
        for i in range(count):
            site = sites[(i * len(sites)) // count]
            yield makers[i % 3](name, site)


def find(fault: Fault, folder: Path) -> dict[str, Any]:
    """Plant one fault and examine; return the rank of the guilty tensor, 0 where it is not listed."""
    network = NETWORKS[fault.network]
    options = fault.options(faults.plan_of(network), folder) if fault.edit else dict(faults.OPTIONS)
    with faults.planted(fault, network) as (model, x, loss), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fxprec.doctor(model, x, loss=loss, options={**options, "reruns": 0, "formats": ("bf16",)})
    rank = next((i for i, row in enumerate(found.ranking, start=1) if fault.guilty(row)), 0)
    first = found.ranking[0]
    harm = found.whole[0].measured
    row = {"kind": fault.kind, "network": fault.network, "where": fault.where, "rank": rank}
    return row | {
        "harm": float(f"{harm:.3g}"),
        "named": first.tensor,
        "damage": float(f"{first.damage:.3g}"),
        "reason": first.reason,
    }


def run_faults(few: bool) -> dict[str, Any]:
    planted = list(all_faults())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for fault in planted[:: 6 if few else 1]:
            rows.append(find(fault, Path(folder)))
            print(*rows[-1].values(), sep=" | ", flush=True)
    first, three = sum(r["rank"] == 1 for r in rows), sum(1 <= r["rank"] <= 3 for r in rows)
    print(f"{len(rows)} faults: guilty first in {first}, in the first three in {three}")
    return {"faults": len(rows), "first": first, "first_three": three, "rows": rows}


def run_ranks() -> dict[str, Any]:
    """Compare predicted and measured damage of each tensor alone in each format."""
    rows = []
    for name, steps in ((name, steps) for steps in (0, TRAINED) for name in RANKED):
        (graph,) = faults.examined(NETWORKS[name], FORMATS, steps)
        tensors = graph.rows(FORMATS)
        for fmt in FORMATS:
            checks = [graph.run_again("", [row], {row.site: fmt}) for row in tensors]
            rank = spearman([c.predicted for c in checks], [c.measured for c in checks])
            rows.append({"network": name, "steps": steps, "format": fmt, "tensors": len(tensors), "spearman": rank})
            print(*rows[-1].values(), sep=" | ", flush=True)
    found = {}
    for steps in (0, TRAINED):
        values = [r["spearman"] for r in rows if r["steps"] == steps]
        found[f"after {steps} steps"] = {"median": median(values), "least": min(values)}
        print(f"after {steps} steps: Spearman's median {median(values):.3f}, least {min(values):.3f}")
    return found | {"rows": rows}


def run_time() -> dict[str, Any]:
    """Examine twelve layers, 256 wide, 8 x 128 tokens."""
    torch.manual_seed(0)
    model, tokens = Language(12, 256), torch.randint(0, 64, (8, 128))
    start, cpu = time.perf_counter(), time.process_time()
    found = fxprec.doctor(model, tokens, tell=print)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(f"{len(found.ranking)} tensors: {seconds:.1f} s, {cpu:.1f} s of CPU, Spearman {found.spearman:.3f}")
    return {
        "layers": 12,
        "width": 256,
        "tokens": 1024,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "tensors": len(found.ranking),
    }


def run_recommended(only: str, seeds: Sequence[int], has_noise: bool) -> dict[str, Any]:
    """Train the demo's tasks."""
    rows = []
    for name, task in recommended.tasks().items():
        for seed in seeds if only in name else ():
            for row in recommended.compare(name, task, "1-2-1", seed, "eager", has_noise):
                rows.append(row)
                print(json.dumps(row), flush=True)
    return {"rows": rows}


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("faults", "ranks", "time", "recommended", "callbacks"))
    parser.add_argument("--few", action="store_true", help="every sixth fault")
    parser.add_argument("--task", default="", help="of `recommended`: digits or text alone")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2), help="of `recommended`")
    parser.add_argument(
        "--noise", action="store_true", help="of `recommended`: again from weights that differ in a bit"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    given = parser.parse_args(args)
    torch.set_num_threads(1)
    found = {
        "faults": lambda: run_faults(given.few),
        "ranks": run_ranks,
        "time": run_time,
        "recommended": lambda: run_recommended(given.task, given.seeds, given.noise),
        "callbacks": lambda: callbacks.measure(2, 128),
    }[given.what]()
    if given.out is not None:
        given.out.write_text(json.dumps({"machine": machine.describe(), **found}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
