"""The printed table and the plain data of a result file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.roofline.count import Counted
from benchmarks.gpu.roofline.estimate import Half, Rates
from benchmarks.gpu.roofline.minimum import Minimum

_HEAD = (
    "| side | launches | GB outside GEMMs, forward / backward | TFLOP bf16 + codes | ms (by bytes alone) | against autocast "
    "| peak GB, forward / backward | saved GB |"
)


def lines(found: Mapping[str, Counted], least: Minimum, rates: Rates) -> Iterator[str]:
    """Yield the table, with what it assumes."""
    flops = ", ".join(f"{name} {rate / 1e12:.0f}" for name, rate in rates.flops.items())
    yield f"{rates.name} ({rates.source}): {rates.bytes / 1e12} TB/s; {rates.cycles / 1e12:.2f}e12 cycles/s of its schedulers"
    yield f"TFLOP/s: {flops}; {rates.launch_seconds * 1e6:.0f} us a launch"
    yield "each pointer counts once a kernel, as long as its bytes or its instructions take; the caller's own is in no peak"
    yield _HEAD
    yield "|---|---|---|---|---|---|---|---|"
    base = found["autocast"].seconds if "autocast" in found else None
    for name, counted in found.items():
        yield _row(name, counted, base)
    yield _least(least, base)
    for name, counted in found.items():
        yield f"{name}: attention {_attention(counted)}; {_bound(counted)}"
    yield from _against_torchao(found)


def _least(least: Minimum, base: float | None) -> str:
    return (
        f"| least possible | - | {_gb(least.forward)} / {_gb(least.backward)} | {least.high_flops / 1e12:.1f} "
        f"+ {least.low_flops / 1e12:.1f} | {least.seconds * 1e3:.1f} | {_ratio(least.seconds, base)} | - | {_gb(least.saved)} |"
    )


def _attention(counted: Counted) -> str:
    costs = (*counted.forward.costs, *counted.backward.costs)
    found = {cost.name.removeprefix("aten.").partition(".")[0] for cost in costs if cost.kind == "attention"}
    return ", ".join(sorted(found)) or "none"


def _bound(counted: Counted) -> str:
    costs = [c for c in (*counted.forward.costs, *counted.backward.costs) if c.is_bound_by_instructions]
    seconds, lost = sum(c.seconds for c in costs), sum(c.seconds - c.by_bytes for c in costs)
    return f"{len(costs)} launches issue longer than they move bytes: {seconds * 1e3:.2f} ms, {lost * 1e3:.2f} of it so"


_BLOCKS = ("mxfp8", "nvfp4")


def _against_torchao(found: Mapping[str, Counted]) -> Iterator[str]:
    """Yield how sides in fp8 compare with the fastest of torchao's in fp8, and each block format with torchao's own."""
    seconds = {name: counted.seconds for name, counted in found.items()}
    rivals = [name for name in found if name.startswith("torchao") and not name.endswith(_BLOCKS)]
    best = min(rivals, key=seconds.__getitem__, default=None)
    if best is not None:
        ratios = [f"{name} {seconds[name] / seconds[best]:.2f}" for name in found if name.startswith("fp8")]
        yield f"time against torchao's best, {best}: {', '.join(ratios)}"
    for name in _BLOCKS:
        if name in found and (rival := f"torchao {name}") in found:
            yield f"time against {rival}: {seconds[name] / seconds[rival]:.2f}"


def _row(name: str, counted: Counted, base: float | None) -> str:
    forward, backward = counted.forward, counted.backward
    flops = forward.flops() + backward.flops()
    low = sum(number for dtype, number in flops.items() if dtype in ("fp8", "fp4") or dtype.startswith("generated"))
    return (
        f"| {name} | {counted.launches} | {_gb(forward.bytes())} / {_gb(backward.bytes())} "
        f"| {(flops.total() - low) / 1e12:.1f} + {low / 1e12:.1f} | {counted.seconds * 1e3:.1f} ({counted.seconds_by_bytes * 1e3:.1f}) "
        f"| {_ratio(counted.seconds, base)} | {_gb(forward.peak)} / {_gb(backward.peak)} | {_gb(backward.saved)} |"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f}"


def _ratio(seconds: float, base: float | None) -> str:
    return "-" if base is None else f"{seconds / base:.2f}"


def kernels(name: str, counted: Counted, at_least: float) -> Iterator[str]:
    """Yield the launches that move ``at_least`` so many bytes, in their order."""
    halves: tuple[tuple[str, Half], ...] = (("forward", counted.forward), ("backward", counted.backward))
    for half, found in halves:
        yield f"{name}, {half}"
        for cost in found.costs:
            if cost.read + cost.written >= at_least:
                moved = f"{cost.read / 1e9:6.3f} + {cost.written / 1e9:.3f} GB"
                bound = "*" if cost.is_bound_by_instructions else " "
                took = f"{cost.seconds * 1e3:6.3f}{bound}({cost.by_bytes * 1e3:.3f}) ms"
                yield f"  {moved} {cost.flops / 1e12:5.2f} T {took} {cost.name[:40]:40} {cost.what[:200]}"


def to_dict(network: str, found: Mapping[str, Counted], least: Minimum, rates: Rates) -> dict[str, Any]:
    """Return plain data for a result file."""
    sides = {
        name: {"forward": counted.forward.to_dict(), "backward": counted.backward.to_dict()}
        for name, counted in found.items()
    }
    return {
        "network": network,
        "rates": asdict(rates),
        "sides": sides,
        "minimum": asdict(least),
    }
