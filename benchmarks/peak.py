"""Peak of a training step on a CPU: live bytes by the allocator's events, and resident memory above the rest.

    python -m benchmarks.peak                              # compiled autocast and fxprec, blocks checkpointed and not
    python -m benchmarks.peak --side "fp8" --checkpoint    # one row, in a process of its own

A transformer of 6 layers, width 256, 8 heads, batch 8 x 256 tokens; parameter gradients (19.5 MB) count. Each row runs in
a process of its own, since what an allocator holds depends on what ran before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fxprec
from benchmarks import machine
from benchmarks.memory.networks import Checkpointed
from fxprec.demo.models import CharTransformer

SIDES: dict[str, dict[str, object] | None] = {
    "autocast": None,
    "bf16": {"recipe": "bf16"},
    "fp8": {"recipe": "fp8"},
    "hfp8 packed": {"recipe": "hfp8", "storage": "packed"},
}
STEPS = 5


def measure(side: str, *, checkpointed: bool) -> dict[str, object]:
    """Return megabytes: live at the peak of one step, and resident above what is there between steps."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = CharTransformer(vocab=96, context=256, layers=6, heads=8, width=256)
    if checkpointed:
        model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    tokens, options = torch.randint(0, 96, (8, 256)), SIDES[side]
    backend = "inductor" if options is None else fxprec.Backend(fxprec.Config.from_options(options))
    compiled = torch.compile(model, backend=backend)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=options is None):
            loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()

    step()
    step()
    model.zero_grad(set_to_none=True)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    for _ in range(STEPS):
        step()
    resident = _status("VmHWM") - resident
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    row = {
        "side": side,
        "checkpointed": checkpointed,
        "live_mb": round(peak_bytes(profiled) / 1e6, 1),
        "resident_mb": round(resident, 1),
    }
    saved = None if options is None else backend.plans[0].saved_bytes  # type: ignore[union-attr]
    return row | {"saved_mb": None if saved is None else round(saved.planned / 1e6, 1)}


def peak_bytes(profiled: profile) -> int:
    """Return the most bytes live at once that were allocated since a memory profile began."""
    kineto = profiled.profiler.kineto_results  # type: ignore[union-attr]
    events = (e for e in kineto.events() if e.name() == "[memory]")
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, help="this row only, as JSON")
    parser.add_argument("--checkpoint", action="store_true", help="each block computed again in backward")
    args = parser.parse_args()
    if args.side is not None:
        print(json.dumps(measure(args.side, checkpointed=args.checkpoint)))
        return
    rows = []
    for flags in ([], ["--checkpoint"]):
        for side in SIDES:
            command = [sys.executable, "-m", "benchmarks.peak", "--side", side, *flags]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rows.append(json.loads(printed.splitlines()[-1]))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print(f"written to {machine.save('peak', {'rows': rows}).name}")


if __name__ == "__main__":
    main()
