"""Reproduce Dettmers' predictions for AlexNet from his measurements: Tables 3 to 6 in, Tables 1 and 7 out.

Source: Dettmers 2016, appendix A. Milliseconds throughout, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fxprec.runtime.aps.predict import exposed

Bits = Literal[32, 8]
Kernels = Literal["nervana", "convnet2"]


@dataclass(frozen=True)
class Transfer:
    """A row of Table 3: milliseconds to synchronise."""

    ms32: float
    ms8: float

    def ms(self, bits: Bits) -> float:
        """Return the time in 32 or 8 bits."""
        return self.ms32 if bits == 32 else self.ms8


# Table 3.
CONV_ACTIVATION = Transfer(0.9, 0.4)
FC2 = Transfer(1.1, 0.5)
FC3 = Transfer(0.4, 0.25)
# Table 4: a whole pass on one GPU, its fully connected part, and that part split over four.
TOTAL_MS: dict[Kernels, float] = {"nervana": 104.1, "convnet2": 177.0}
FC_MS, FC_SPLIT_MS = 6.5, 3.34
FC2_FORWARD_MS, FC3_FORWARD_MS, FC3_BACKWARD_MS = 0.3, 0.15, 0.15

Overlaps: TypeAlias = tuple[tuple[Transfer, float], ...]
# Transfers in a sub-batch, each with the computation it runs beside. The formula is lost from the paper's text; these
# three (the largest layer's transfer is hidden) reproduce both of the paper's speedups.
OVERLAPS: Overlaps = ((FC2, FC2_FORWARD_MS), (FC3, FC3_FORWARD_MS), (FC3, FC3_BACKWARD_MS))
# This other reading gives 3.44x and 3.65x, but also Krizhevsky's 3.66x within 1 %, which the first misses (3.71x).
BOTH_WAYS: Overlaps = (*OVERLAPS, (FC2, FC2_FORWARD_MS))


def four_gpu_speedup(
    bits: Bits, kernels: Kernels = "nervana", num_gpus: int = 4, overlaps: Overlaps = OVERLAPS
) -> float:
    """Return one machine's speedup (A.1.3): data-parallel convolutions, then a sub-batch per GPU through split layers.

    The activations of the first sub-batch and the errors of the last one overlap with nothing.
    """
    ends = 2 * CONV_ACTIVATION.ms(bits)
    per_sub_batch = sum(exposed(transfer.ms(bits), computation) for transfer, computation in overlaps)
    total = TOTAL_MS[kernels]
    parallel = total - FC_MS + num_gpus * (FC_SPLIT_MS + per_sub_batch) + ends
    return num_gpus * total / parallel


@dataclass(frozen=True)
class ClusterRow:
    """A row of Table 6: all forward passes of the fully connected layers, and one transfer of activations."""

    sub_batch: int
    forward: float
    single32: float
    single8: float


CLUSTER = (
    ClusterRow(128, 624, 2.1, 0.35),
    ClusterRow(256, 312, 4.2, 0.55),
    ClusterRow(512, 156, 7.15, 1.13),
    ClusterRow(1024, 78, 17.4, 2.25),
    ClusterRow(2048, 39, 25.5, 3.26),
    ClusterRow(12288, 6.5, 250, 31),
)
NUM_MESSAGES = 31  # to the other nodes
HIDING_MS = 1.3  # the first layer's product, which each transfer but the last runs beside
BASELINE_MS: dict[Kernels, float] = {"nervana": 10_000, "convnet2": 17_000}  # 96 batches on one GPU


def cluster_sync(row: ClusterRow, bits: Bits) -> float:
    """Return the milliseconds of synchronisation that are not hidden, or those of one transfer if all are hidden."""
    single = row.single32 if bits == 32 else row.single8
    left = NUM_MESSAGES * exposed(single, HIDING_MS)
    return left if left else single


def cluster_speedup(row: ClusterRow, bits: Bits, kernels: Kernels = "nervana") -> float:
    """Return the speedup on 32 nodes, 96 GPUs (A.2.2): convolutions, all forward passes, and what is not hidden."""
    convolutions = TOTAL_MS[kernels] - FC_MS
    return BASELINE_MS[kernels] / (convolutions + row.forward + cluster_sync(row, bits))


# Numbers that the paper prints (Tables 1 and 7), for comparison.
PUBLISHED_FOUR_GPUS: dict[Bits, float] = {32: 3.53, 8: 3.67}
PUBLISHED_KRIZHEVSKY = 3.66  # measured by Krizhevsky (2014) on four GPUs
PUBLISHED_CLUSTER: dict[Kernels, tuple[tuple[float, float], ...]] = {
    "nervana": ((13.4, 13.8), (20, 24.4), (23, 39.3), (14.8, 48.6), (11.3, 50.6), (1.3, 9.7)),
    "convnet2": ((20.7, 21.4), (29.7, 35.2), (33.5, 51.9), (22.7, 61), (17.7, 62.8), (2.15, 15.5)),
}
