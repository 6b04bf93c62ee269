"""The second process: CPU seconds to the end of the first training step, where the first process filled the caches.

    python -m benchmarks.warm_start

A two-layer transformer with embedding and loss, compiled by Inductor, by fxprec, by fxprec within a peak budget, and by
both with AOTAutograd's cache off. Each side has a cache folder of its own, filled by one process; then the sides take turns, a fresh process a time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine

OPTIONS: dict[str, dict[str, Any] | None] = {
    "inductor": None,
    "fxprec": {"recipe": "hfp8"},
    "fxprec within a budget": {"recipe": "fp8", "peak_budget": "90%"},
}
SIDES = (*OPTIONS, "fxprec, cache off", "fxprec within a budget, cache off")


def cpu() -> float:
    """Return CPU seconds of this process and of those it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def one_step(name: str) -> dict[str, Any]:
    """Compile and run one step. Seconds from ``torch.compile`` on, which imports the backend, and of the process."""
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch.nn.functional as F

    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(2)]
    net = torch.nn.Sequential(torch.nn.Embedding(100, 64), *layers, torch.nn.Linear(64, 100))
    start = cpu()
    compiled = torch.compile(net, backend=name.split()[0], options=OPTIONS[name])
    tokens = torch.randint(0, 100, (8, 16))
    loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    end = cpu()
    bits = hashlib.sha256(loss.detach().numpy().tobytes())
    for parameter in net.parameters():
        bits.update(parameter.grad.numpy().tobytes())
    return {"from_compile": end - start, "process": end, "bits": bits.hexdigest()[:16]}


def in_process(side: str, folder: str) -> dict[str, Any]:
    name, _, off = side.partition(", ")
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder, str(SIDES.index(side)))), "OMP_NUM_THREADS": "1"}
    env |= {"TORCHINDUCTOR_AUTOGRAD_CACHE": "0"} if off else {}
    # As a package that is installed: its modules are not compiled again in each process.
    env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(folder, "bytecode"))}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.warm_start", "--only", name]
    found: dict[str, Any] = json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--only", choices=OPTIONS, help="one step with these options, in this process")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(one_step(args.only)))
        return
    with tempfile.TemporaryDirectory() as folder:
        first = {side: in_process(side, folder) for side in SIDES}
        runs = [{side: in_process(side, folder) for side in SIDES} for _ in range(args.times)]
    rows = []
    for side in SIDES:
        row: dict[str, Any] = {"side": side, "runs": args.times}
        row["same_bits"] = all(run[side]["bits"] == first[side]["bits"] for run in runs)
        for what in ("from_compile", "process"):
            row[f"first_{what}_s"] = round(first[side][what], 2)
            row[f"second_{what}_s"] = round(statistics.median(run[side][what] for run in runs), 2)
            ratios = [run[side][what] / run[SIDES[0]][what] for run in runs]
            row[f"{what}_to_inductor"] = round(statistics.median(ratios), 3)
        rows.append(row)
        print(row)
    print(machine.save("warm-start", rows).name)


if __name__ == "__main__":
    main()
