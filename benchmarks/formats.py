"""Rounding to a number format: ``fxprec.quantize`` beside ``qtorch.quant.float_quantize``, in one process.

    pip install ninja qtorch && python -m benchmarks.formats

Runs are interleaved (A B C, A B C, ...) and medians compared. qtorch always makes a new tensor, so ``fresh`` is the
like-for-like row; ``out`` rounds into a tensor that exists. qtorch compiles a C++ extension when imported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import machine
from fxprec.numerics.formats import HFP8_143, parse
from fxprec.numerics.reference import reference_quantize
from fxprec.numerics.rounding import decode, encode, quantize

# qtorch has no bias and its own subnormal rules; 1-5-2 without bias is the format both have.
SHARED = "1-5-2"
FORMATS = (SHARED, HFP8_143.name, "bf16")


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    x = torch.randn(options.elements, generator=torch.Generator().manual_seed(0))
    rows = [measure(x, threads, options.rounds) for threads in options.threads]
    rows.append(agreement(x[:1_000_000]))
    for row in rows:
        print(json.dumps(row))
    cpu = machine.describe()["cpu"].partition(" (")[0].lower().replace(" ", "-")
    print(machine.save(f"formats-{cpu}", rows))


def measure(x: torch.Tensor, threads: int, rounds: int) -> dict[str, Any]:
    """Return median milliseconds of every side at ``threads`` threads, and the ratios to qtorch."""
    torch.set_num_threads(threads)
    median = interleaved(sides(x), rounds)
    baseline = median["qtorch fresh"]
    bytes_moved = x.numel() * x.element_size()
    return {
        "threads": threads,
        "elements": x.numel(),
        "rounds": rounds,
        "load_average": round(os.getloadavg()[0], 1),  # above 0: other work shared the cores
        "median_ms": {name: round(seconds * 1e3, 2) for name, seconds in median.items()},
        "times_faster_than_qtorch": {
            name: round(baseline / seconds, 2) for name, seconds in median.items() if name.startswith("quantize")
        },
        "gb_per_s_of_float32": {
            name: round(bytes_moved / seconds / 1e9, 2) for name, seconds in median.items() if "code" in name
        },
    }


def sides(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    from qtorch.quant import float_quantize

    fmt, out, codes = parse(SHARED), torch.empty_like(x), encode(x, SHARED)
    found: dict[str, Callable[[], object]] = {
        "qtorch fresh": lambda: float_quantize(x, fmt.exponent_bits, fmt.mantissa_bits, "nearest"),
        f"quantize out {SHARED}": lambda: quantize(x, fmt, out=out),
        "encode": lambda: encode(x, SHARED),
        "decode": lambda: decode(codes, SHARED),
    }
    for name in FORMATS:
        found[f"quantize fresh {name}"] = lambda name=name: quantize(x, name)  # type: ignore[misc]
    return found


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return median seconds of each call, after two rounds that compile and warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


def agreement(x: torch.Tensor) -> dict[str, Any]:
    """Return the share of values on which each side differs from the exact reference."""
    from qtorch.quant import float_quantize

    fmt = parse(SHARED)
    x = torch.cat([x, x.bfloat16().float()])  # bfloat16 values hit ties
    wanted = reference_quantize(x, fmt)
    foreign = float_quantize(x, fmt.exponent_bits, fmt.mantissa_bits, "nearest")
    return {
        "format": SHARED,
        "elements": x.numel(),
        "share_wrong": {
            "quantize": float((quantize(x, fmt) != wanted).double().mean()),
            "qtorch": float((foreign != wanted).double().mean()),
        },
    }


if __name__ == "__main__":
    main()
