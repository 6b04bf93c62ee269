"""The least a step could move: what is left when every kernel that could be fused is, and every activation is 8 bits.

Twelve products of the four linear layers in fp8; each value is written once and read once by each kernel that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.roofline.estimate import Rates
from benchmarks.gpu.roofline.sides import Network


@dataclass(frozen=True)
class Minimum:
    """Bytes outside GEMMs and attention of both halves, bytes saved, FLOPs and seconds."""

    forward: int
    backward: int
    saved: int
    linear_flops: float
    attention_flops: float
    seconds: float


def minimum(network: Network, rates: Rates) -> Minimum | None:
    """Count a Llama block's; None of another network."""
    shape = network.shape
    if shape is None:
        return None
    batch, tokens, _ = network.input
    rows, heads = batch * tokens, sum(shape.widths)
    wide, hidden = rows * shape.width, rows * shape.hidden
    weights = shape.width * (heads + shape.width + 3 * shape.hidden)
    # Bytes an element: 4 for the residual stream and the weights, 2 between GEMMs, 1 for codes. Two norms, the first
    # reads the stream, the second also what attention adds; SwiGLU; the last sum. The weights are rounded once, with
    # their transpose.
    norms = wide * (4 + 1 + 1) + wide * (4 + 2 + 4 + 1 + 1)
    forward = norms + wide * (1 + 2) + hidden * (2 * 2 + 1 + 1) + wide * (4 + 2 + 4) + weights * (4 + 1 + 1)
    # What comes in becomes codes in both layouts; SwiGLU reads its gradient, gate and up in codes, and writes codes of
    # both; each norm reads a gradient, its input in codes, and the stream's gradient.
    swiglu = hidden * (2 + 2 * 1 + 2 * 2)
    backward = wide * (4 + 2) + swiglu + wide * (2 + 1 + 4 + 4 + 2) + rows * heads * (2 + 2) + wide * (2 + 1 + 4 + 4)
    # Codes of both norms' inputs; q, k, v and what attention gives; codes of that; gate, up and their product; weights.
    saved = wide * (1 + 1 + 2 + 1) + rows * heads * 2 + hidden * 3 + weights
    linear = 3 * 2.0 * rows * weights
    attention = 7 * 2.0 * batch * shape.width * tokens**2 / 2  # the causal half
    fastest = rates.flops.get("fp8", rates.flops["bfloat16"])
    seconds = (forward + backward) / rates.bytes + linear / fastest + attention / rates.flops["bfloat16"]
    return Minimum(forward, backward, saved, linear, attention, seconds)
