"""Dettmers 2016, Tables 1 and 7: the speedups that his model predicts, from his own measurements."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers import svg
from benchmarks.papers.claims import Claim, Verdict, exactly
from benchmarks.papers.found import Found, Row
from fxprec.runtime.aps import predict_paper as paper

TITLE = "Predicted speedups of AlexNet on 4 and 96 GPUs"
SOURCE = "Tables 1 and 7"
FOUR, CHECK = "4 GPUs", "4 GPUs, Krizhevsky's kernels"
KERNELS: tuple[paper.Kernels, ...] = ("nervana", "convnet2")


def _row(index: int, kernels: str) -> str:
    return f"96 GPUs, sub-batch {paper.CLUSTER[index].sub_batch}, {kernels}"


PUBLISHED = {
    FOUR: {"32-bit": paper.PUBLISHED_FOUR_GPUS[32], "8-bit": paper.PUBLISHED_FOUR_GPUS[8]},
    CHECK: {"32-bit": paper.PUBLISHED_KRIZHEVSKY},
    **{
        _row(i, kernels): {"32-bit": row[0], "8-bit": row[1]}
        for kernels in KERNELS
        for i, row in enumerate(paper.PUBLISHED_CLUSTER[kernels])
    },
}
SMALLER = ""
DEVIATES = (
    "The formula for the time that computation does not hide on 4 GPUs is lost from the paper's text. Taken as "
    "not hidden are the three transfers that give back both printed speedups. The *other reading* takes each "
    "transfer of the two small layers, forward and backward. The paper calls Krizhevsky's kernels 75 % slower in "
    "one place and takes 17 s for 10 s in another. Here 17 s is taken. The paper's sub-batch of 2056 is the 2048 "
    "of its Table 6."
)
SEEDS = 1
OTHER = "other reading, 32-bit"


def run(seed: int, full: bool) -> Iterator[Row]:
    """Four GPUs, then the cluster with both kernels."""
    for name, kernels in ((FOUR, KERNELS[0]), (CHECK, KERNELS[1])):
        other = paper.four_gpu_speedup(32, kernels, overlaps=paper.BOTH_WAYS)
        yield (
            name,
            {"32-bit": paper.four_gpu_speedup(32, kernels), "8-bit": paper.four_gpu_speedup(8, kernels), OTHER: other},
        )
    for kernels in KERNELS:
        for i, row in enumerate(paper.CLUSTER):
            cells = {f"{bits}-bit": paper.cluster_speedup(row, bits, kernels) for bits in (32, 8)}
            yield _row(i, kernels), cells


def _within_a_percent(found: Found) -> Verdict:
    """1 %, or half a unit of what is printed."""
    off = {}
    for row, cells in PUBLISHED.items():
        for bits, wanted in cells.items():
            if row != CHECK:
                half = 0.5 * 10.0 ** -len(str(wanted).partition(".")[2])
                off[f"{row}, {bits}"] = abs(found.mean(row, bits) - wanted) / max(0.01 * wanted, half)
    worst = max(off, key=off.__getitem__)
    return exactly(off[worst] <= 1, f"{len(off)} figures; the furthest is {worst}")


def _krizhevsky(found: Found) -> Verdict:
    """His measured speedup, which both readings of the formula are held against."""
    wanted = PUBLISHED[CHECK]["32-bit"]
    ours, other = found.mean(CHECK, "32-bit"), found.mean(CHECK, OTHER)
    detail = f"{ours:.2f}, {100 * (ours / wanted - 1):+.1f} %; other reading {other:.2f}, {100 * (other / wanted - 1):+.1f} %"
    return Verdict("holds" if abs(ours / wanted - 1) <= 0.01 else "not shown", detail)


CLAIMS = [
    Claim("Tables 1 and 7 follow from the paper's own measurements (1 %)", _within_a_percent),
    Claim(
        "the model predicts Krizhevsky's measured 3.66x within 1 %",
        _krizhevsky,
        "The reading that gives back Table 1 misses his figure. The reading that gives his figure makes Table "
        "1's 3.53 a 3.44. No reading of the appendix gives both.",
    ),
]


def draw(found: Found) -> str:
    """Speedup by sub-batch, ours as lines of points, for both kernels."""
    sizes = [row.sub_batch for row in paper.CLUSTER]
    lines = {
        f"{bits}, {kernels}": [found.mean(_row(i, kernels), bits) for i in range(len(sizes))]
        for kernels in KERNELS
        for bits in ("32-bit", "8-bit")
    }
    return svg.curves(lines, "sub-batch", "speedup on 96 GPUs", xs=sizes, is_log_x=True)
