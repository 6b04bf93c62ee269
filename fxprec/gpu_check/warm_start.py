"""Item 9: the first step of two processes, one after the other; the second finds the first one's code in a cache."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time

from fxprec.errors import GpuCheckError
from fxprec.gpu_check.ground import Ground, within

PATIENCE = 20.0
"""Seconds after which, and again after as many, a process writes its stack."""

TO_TELL = 5.0
"""Seconds that are left, once a process was too slow, to say where it was."""


def check(ground: Ground) -> None:
    """Time both processes; the second must not be slower."""
    if not ground.needs_gpu("a second process that finds the first's code"):
        return
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="fxprec-warm-start-") as folder:
        for name in ("cold", "warm"):
            with ground.case(f"the first step of a process with {name} caches"):
                found[name], stack = _process(folder, ground.seconds_left - TO_TELL)
                ground.fact(f"first step, {name} caches, s", round(found[name], 1))
                if stack:
                    ground.fact(f"where the process with {name} caches was, innermost first", stack)
    if len(found) == 2:
        with ground.case("a second process is no slower"):
            within("the first step of the second process over that of the first", found["warm"] / found["cold"], 1.0)


def _process(folder: str, limit: float) -> tuple[float, list[str]]:
    """Return the seconds of a process's first step, and its last stack if the step took longer than `PATIENCE`."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_CACHE_DIR"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": folder}
    command = [sys.executable, "-m", "fxprec.gpu_check.warm_start"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
        raise GpuCheckError(f"not done after {limit:.0f} s; it was in {'; '.join(_last_stack(said)[:8])}") from error
    if run.returncode != 0:
        raise GpuCheckError(f"exit code {run.returncode}: {(run.stderr.strip() or 'nothing said').splitlines()[-1]}")
    return float(json.loads(run.stdout.splitlines()[-1])["seconds"]), _last_stack(run.stderr)


def _last_stack(said: str) -> list[str]:
    """Return the frames of the last stack that `faulthandler` wrote for the main thread, which it writes last."""
    lines = [line.strip() for line in said.splitlines()]
    starts = [i for i, line in enumerate(lines) if line.startswith(("Thread ", "Current thread "))]
    return [line for line in lines[starts[-1] + 1 :] if line.startswith("File ")][:20] if starts else []


def main() -> None:
    """Compile a transformer and run a step; print how long the step took, without imports."""
    import torch

    import fxprec
    from fxprec.gpu_check.samples import transformer

    device = torch.device("cuda")
    model = transformer(device, width=256, heads=4)
    x = torch.randn(2, 128, 256, device=device)
    config = fxprec.Config(recipe="fp8", low_ratio=1.0, strict=True)
    compiled = torch.compile(model, backend=fxprec.Backend(config))
    torch.cuda.synchronize(device)
    faulthandler.dump_traceback_later(PATIENCE, repeat=True)
    start = time.perf_counter()
    compiled(x).square().mean().backward()
    torch.cuda.synchronize(device)
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
