"""`fxprec.arith.matmul` of 512x512x512 against the plain loop and against qtorch's emulation (pip install qtorch).

    python -m benchmarks.optim.arith [1-5-2 1-6-9]

qtorch rounds inputs and the result of a float32 product, not what happens between: a lower bound on its time.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import machine
from fxprec import arith


def seconds(call: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def qtorch_step(a: torch.Tensor, b: torch.Tensor) -> Callable[[], Any] | None:
    """The same sum in qtorch's functions: round each product and each partial sum, one k at a time."""
    try:
        from qtorch.quant import float_quantize
    except Exception as error:  # it compiles an extension when imported
        print("no qtorch:", str(error).partition("\n")[0])
        return None

    def run() -> torch.Tensor:
        total = torch.zeros(a.shape[0], b.shape[1])
        for k in range(a.shape[1]):
            product = float_quantize(a[:, k, None] * b[None, k], exp=4, man=3, rounding="nearest")
            total = float_quantize(total + product, exp=6, man=9, rounding="nearest")
        return total

    return run


def main() -> None:
    torch.set_num_threads(2)
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(512, 512, generator=g), torch.randn(512, 512, generator=g)
    rows = []
    for accumulate in sys.argv[1:] or ("1-5-2", "1-6-9"):
        for kahan in (False,):
            fast = arith.matmul(a, b, "1-4-3", accumulate, kahan)
            start = time.perf_counter()
            slow = arith.matmul(a, b, "1-4-3", accumulate, kahan, method="reference")
            plain = time.perf_counter() - start
            t = seconds(lambda acc=accumulate, k=kahan: arith.matmul(a, b, "1-4-3", acc, k), 7)
            rows.append({"format": "1-4-3", "accumulate": accumulate, "kahan": kahan, "seconds": t, "plain_loop_seconds": plain,
                         "speedup": plain / t, "bit_exact": torch.equal(fast, slow)})  # fmt: skip
            print(rows[-1], flush=True)
    step = qtorch_step(a, b)
    if step is not None:
        rows.append({"qtorch": "1-4-3 products, 1-6-9 sums", "seconds": seconds(step, 1)})
        print(rows[-1])
    print("wrote", machine.save("arith-matmul", rows))


if __name__ == "__main__":
    main()
