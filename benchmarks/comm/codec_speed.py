"""Encoding and decoding on one core: APS's wires beside qtorch and bitsandbytes' blockwise quantisation, in one run.

    pip install qtorch ninja bitsandbytes && python -m benchmarks.comm.codec_speed

GB/s are of float32, encode and decode together: n * 4 bytes / (encode + decode seconds). Runs are interleaved,
medians reported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import machine
from fxprec.runtime.aps.coder import Coder
from fxprec.runtime.aps.wire import wire_of

FORMATS = ("e5m2", "1-5-2", "1-4-3", "1-3-0", "dynamic-tree", "linear", "bf16")


def aps(name: str, x: Tensor) -> Callable[[], Tensor]:
    """Scale by a power of two, encode, decode, unscale: what the exchange does to a bucket."""
    coder = Coder(wire_of(name), None, bounded=True)
    bounds, t = [(0, x.numel())], torch.tensor([2 if coder.wire.top else -3], dtype=torch.int32)
    mask, out = torch.ones(1), torch.empty_like(x)

    def run() -> Tensor:
        codes = coder.scale_and_encode(x if coder.wire.code_bytes == 1 else x.clone(), bounds, t)
        return coder.decode_scaled(codes, bounds, -t, mask, 4, out)

    return run


def others(x: Tensor) -> dict[str, Callable[[], object]]:
    """qtorch rounds without packing (its values stay float32); bitsandbytes packs blocks of 256 into bytes."""
    found: dict[str, Callable[[], object]] = {}
    try:
        from qtorch.quant import float_quantize

        found["qtorch 1-5-2 (round only)"] = lambda: float_quantize(x, exp=5, man=2, rounding="nearest")
    except (ImportError, OSError, RuntimeError) as error:
        print("qtorch:", str(error).splitlines()[0])
    try:
        from bitsandbytes import functional

        def blockwise() -> object:
            codes, state = functional.quantize_blockwise(x, blocksize=256)
            return functional.dequantize_blockwise(codes, state)

        blockwise()
        found["bitsandbytes blockwise"] = blockwise
    except (ImportError, OSError, RuntimeError, NotImplementedError, AttributeError) as error:
        print("bitsandbytes:", str(error).splitlines()[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=6_250_000)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(args.elements, generator=torch.Generator().manual_seed(0)) / 8
    sides: dict[str, Callable[[], object]] = {f"APS {name}": aps(name, x) for name in FORMATS}
    sides.update(others(x))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    best = {name: min(found[1:]) for name, found in seconds.items()}
    rows = {
        name: {
            "gb_per_s": round(x.numel() * 4 / s / 1e9, 3),
            "best_gb_per_s": round(x.numel() * 4 / best[name] / 1e9, 3),
            "ns_per_number": round(s / x.numel() * 1e9, 3),
            **{f"times {other}": round(median[other] / s, 2) for other in sides if not other.startswith("APS")},
        }
        for name, s in median.items()
    }
    for name, row in rows.items():
        print(f"{name:28} {row}")
    load = round(os.getloadavg()[0], 1)
    print(machine.save("aps-codec-speed", {"elements": x.numel(), "threads": 1, "load_average": load, "sides": rows}))


if __name__ == "__main__":
    main()
