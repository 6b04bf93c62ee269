"""Does `numerics.check` catch faults planted into fxprec, and does it raise false alarms?

    python -m benchmarks.planted_faults
    python -m benchmarks.planted_faults --clean 50

The first plants each fault of benchmarks/faults.py, alone, and checks a small block against golden files written
without it. The second checks 50 blocks of other weights without a fault, on one thread as they were written, on two,
and on two with the instructions of an older processor.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxprec
from benchmarks import machine
from benchmarks.faults import FAULTS, PACKED, SIMULATED, Fault
from fxprec.testing import Thresholds, verify
from fxprec.testing.check import Outcome
from fxprec.testing.golden import Golden, load

RULES = Thresholds(sqnr=12.0)  # blocks this small, at low_ratio 0.6, keep 14.5 to 17 dB in their worst tensor

NATIVE = {"recipe": "fp8", "low_ratio": 0.6}
OLD_CPU = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
LOUD = 13.0  # about 2 % of normal numbers times this exceed 30, the largest of 1-4-3+4, and none twice that


class Block(nn.Module):
    """(batch, width / 2) to (batch, width / 4)."""

    def __init__(self, width: int = 32, loudness: float = 1.0) -> None:
        super().__init__()
        self.loudness = loudness
        self.up, self.norm = nn.Linear(width // 2, width), nn.LayerNorm(width)
        self.mix, self.down = nn.Linear(width, width), nn.Linear(width, width // 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.up(x) * self.loudness)
        return self.down(torch.relu(self.mix(hidden * self.loudness) / self.loudness)) + self.down(hidden)


def inputs(width: int, seed: int, batch: int = 64) -> Tensor:
    """Numbers of bfloat16, as data often are: some lie on ties between two 8-bit numbers."""
    return torch.randn(batch, width // 2, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def check(options: Mapping[str, Any], golden: Path, *, width: int = 32, loud: bool = False, seed: int = 0) -> Outcome:
    """Run one check, and write the golden file where it is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxprec.FxprecWarning)
        thresholds = Thresholds(sqnr=None, k=1e4) if loud else RULES
        factory = lambda: Block(width, LOUD if loud else 1.0)  # noqa: E731
        x = inputs(width, seed)
        return verify(factory, x, options=options, thresholds=thresholds, golden=golden, seed=seed)


def golden_for(fault: Fault, folder: Path) -> Path:
    return folder / f"{zip_name(fault.options)}-{fault.loud}.json"


def zip_name(options: Mapping[str, Any]) -> str:
    return "-".join(str(v) for v in options.values())


def caught(fault: Fault, folder: Path) -> Outcome:
    """Check once without the fault, which must find nothing, then with it."""
    golden = golden_for(fault, folder)
    if not golden.exists():
        clean = check(fault.options, golden, loud=fault.loud)
        assert clean.wrote == golden, clean.message()
        again = check(fault.options, golden, loud=fault.loud)
        assert not again.findings, again.message()
    with fault.planted():
        return check(fault.options, golden, loud=fault.loud)


def kinds(outcome: Outcome) -> dict[str, int]:
    """Count findings by what found them."""

    def kind(text: str, tensor: str) -> str:
        if tensor.startswith("("):
            return tensor[1:-1]
        rule = next((r for r in ("SQNR", "error is", "missing") if text.startswith(r)), None)
        return rule or "statistics"

    return dict(Counter(kind(f.text, f.tensor) for f in outcome.findings))


def plant(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for fault in FAULTS:
        outcome = caught(fault, folder)
        worst = max(outcome.findings, key=lambda f: f.severity, default=None)
        said = "" if worst is None else f"{worst.tensor}: {worst.text}"
        rows.append({"fault": fault.what, "caught": bool(outcome.findings), "by": kinds(outcome), "worst": said})
        print(rows[-1], flush=True)
    return rows


def clean(folder: Path, models: int, width: int, threads: int) -> dict[str, Any]:
    """Check ``models`` blocks of other weights; return the false alarms. A golden file is written where missing.

    ``moved``: models of which any number is not the one stored, which has 7 digits.
    """
    torch.set_num_threads(threads)
    alarms: list[str] = []
    moved = 0
    for seed in range(models):
        options = (SIMULATED, PACKED, NATIVE)[seed % 3]
        outcome = check(options, folder / f"{seed}.json", width=width, seed=seed)
        stored = load(folder / f"{seed}.json")
        moved += any(
            not math.isclose(a, b, rel_tol=2e-6) for a, b in zip(*map(values, (outcome.golden, stored)), strict=True)
        )
        message = outcome.message()
        alarms += [f"seed {seed}: {message}"] * (message != "nothing differs")
    return {"false_alarms": len(alarms), "moved": moved, "alarms": alarms}


def values(golden: Golden) -> list[float]:
    return [n.value for entry in golden.entries for n in entry.numbers.values()]


def repeat(args: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Write golden files on one thread; check on one and two, and as a processor without AVX would compute."""
    rows = []
    for what, threads, environment in (("write", 1, {}), ("check", 1, {}), ("check", 2, {}), ("check", 2, OLD_CPU)):
        command = ["-m", "benchmarks.planted_faults", "--clean", str(args.clean), "--width", str(args.width)]
        command = [sys.executable, *command, "--folder", folder, "--threads", str(threads)]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
        rows.append({"what": what, "threads": threads, "environment": environment, "models": args.clean})
        rows[-1] |= json.loads(done.stdout.splitlines()[-1])
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clean", type=int, default=0, help="number of models to check without faults")
    parser.add_argument("--width", type=int, default=128, help="of the blocks without faults")
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        print(json.dumps(clean(Path(args.folder), args.clean, args.width, args.threads)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.clean:
            print(machine.save("numerics-clean", repeat(args, folder)).name)
        else:
            print(machine.save("numerics-planted-faults", plant(Path(folder))).name)


if __name__ == "__main__":
    main()
