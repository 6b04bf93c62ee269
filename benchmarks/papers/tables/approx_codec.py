"""Dettmers 2016, section 3.2: nanoseconds to compress and decompress a number."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.papers.claims import Claim
from benchmarks.papers.eight_bit import TYPES
from benchmarks.papers.found import Row
from fxprec.runtime.aps import codecs
from fxprec.runtime.aps.codecs import codec
from fxprec.runtime.aps.coder import Coder
from fxprec.runtime.aps.wire import wire_of

TITLE = "Time to compress and decompress"
SOURCE = "section 3.2"
ENCODE, DECODE = "compress, ns a number", "decompress, ns a number"
PUBLISHED = {"dynamic-tree": {ENCODE: 1.0, DECODE: 0.5}}
SMALLER = "One CPU core takes the place of a GTX Titan."
DEVIATES = (
    "The hardware is another, so no claim is made. The search for a tensor's largest number is left out, as "
    "where APS codes a bucket whose exponent is known. *torch* is the same codec in torch's operations. Each "
    "figure is the median of rounds on a shared machine."
)
SEEDS = 1
CLAIMS: list[Claim] = []


def run(seed: int, full: bool) -> Iterator[Row]:
    """The four types in the C++ kernel, the first also in torch's operations."""
    x = torch.rand(25_000_000 if full else 6_250_000, generator=torch.Generator().manual_seed(0)) - 0.5
    for name in TYPES:
        coder = Coder(wire_of(name), None, bounded=True)
        codes = coder.codes_of(x)
        yield (
            name,
            _cells(x.numel(), lambda coder=coder: coder.codes_of(x), lambda coder=coder, c=codes: coder.values_of(c)),
        )
    c = codec(TYPES[0])
    codes = codecs.encode_values(x, c)
    yield (
        f"{TYPES[0]}, torch",
        _cells(x.numel(), lambda: codecs.encode_values(x, c), lambda: codecs.decode_values(codes, c)),
    )


def _cells(count: int, encode: Callable[[], object], decode: Callable[[], object]) -> dict[str, float]:
    return {ENCODE: _nanoseconds(encode) / count, DECODE: _nanoseconds(decode) / count}


def _nanoseconds(call: Callable[[], object], rounds: int = 5) -> float:
    """Median processor time of a call."""
    call()
    times = []
    for _ in range(rounds):
        start = time.process_time_ns()
        call()
        times.append(time.process_time_ns() - start)
    return statistics.median(times)
