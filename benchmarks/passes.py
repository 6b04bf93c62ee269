"""Time of the passes against the number of nodes of the joint graph, and the exponent of the fit.

    python -m benchmarks.passes

A residual transformer of growing depth is compiled under fake tensors, so nothing is allocated or computed. CPU
seconds of this process, so that other load on the machine does not count; the first compile is thrown away.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxprec
from benchmarks import machine
from fxprec.demo.models import CharTransformer
from fxprec.passes import pipeline

LAYERS = (3, 6, 12, 24, 48, 96, 125)


class StopHere(Exception):
    """Ends the compilation once the passes have run."""


@contextmanager
def measured(row: dict[str, Any]) -> Iterator[None]:
    """Put nodes and CPU seconds of the passes, by pass and in total, into ``row``."""
    run = pipeline.run

    def timed(work: Any, passes: Any) -> Any:
        row["nodes"] = len(work.joint.graph.nodes)
        ends = [time.process_time()]
        run(work, passes, observer=lambda report, work: ends.append(time.process_time()))
        names = [step.name for step in passes]
        row["by_pass"] = {n: round(b - a, 4) for n, a, b in zip(names, ends, ends[1:], strict=False)}
        row["seconds"] = round(ends[-1] - ends[0], 4)
        raise StopHere

    with mock.patch.object(pipeline, "run", timed):
        yield


def measure(layers: int, storage: str) -> dict[str, Any]:
    """Plan one training step of ``layers`` transformer blocks."""
    torch._dynamo.reset()
    row: dict[str, Any] = {"layers": layers, "storage": storage}
    config = fxprec.Config(recipe="hfp8", storage=storage, lowering="eager", low_ratio=0.5)  # type: ignore[arg-type]
    start = time.process_time()
    with measured(row), FakeTensorMode(allow_non_fake_inputs=True):
        model: nn.Module = CharTransformer(vocab=16, context=8, layers=layers, width=8, heads=2)
        codes = torch.zeros(2, 8, dtype=torch.int64)
        try:
            torch.compile(model, backend=fxprec.Backend(config))(codes)
        except Exception as error:
            if "nodes" not in row:
                raise error
    row["with_tracing_seconds"] = round(time.process_time() - start, 2)
    return row


def exponent(rows: list[dict[str, Any]]) -> float:
    """Return b of the least-squares fit seconds = a * nodes ** b."""
    x, y = [math.log(r["nodes"]) for r in rows], [math.log(r["seconds"]) for r in rows]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, fits = [], {}
    for storage in ("packed", "simulate"):
        measure(2, storage)
        for layers in options.layers:
            rows.append(measure(layers, storage))
            print(*(f"{k} {v}" for k, v in rows[-1].items()), sep="  ", flush=True)
        fits[storage] = round(exponent([r for r in rows if r["storage"] == storage]), 3)
    print(f"seconds = a * nodes ** b: {fits}")
    print(machine.save("passes", {"runs": rows, "exponents": fits}))


if __name__ == "__main__":
    main()
