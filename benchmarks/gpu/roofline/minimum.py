"""The least a step could move: what is left when every kernel that could be fused is, and every activation is 8 bits.

Each value is written once and read once by each kernel that needs it; codes that a product multiplies are written in
both layouts. Linear layers are three products each in fp8. Convolutions, which have none, multiply bfloat16 made of
the codes; batch norm reads a tensor twice, for its statistics and to apply them, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.roofline.estimate import Rates
from benchmarks.gpu.roofline.sides import Network


@dataclass(frozen=True)
class Minimum:
    """Bytes outside GEMMs and attention of both halves, bytes saved, FLOPs of codes and of bfloat16, seconds."""

    forward: int
    backward: int
    saved: int
    low_flops: float
    high_flops: float
    seconds: float


def minimum(network: Network, rates: Rates) -> Minimum:
    """Count a Llama block's, an encoder layer's, or a ResNet stage's."""
    return {"block": _block, "encoder": _encoder, "stage": _stage}[network.kind](network, rates)


def _block(network: Network, rates: Rates) -> Minimum:
    shape = network.shape
    assert shape is not None
    rows, heads = network.input[0] * network.input[1], sum(shape.widths)
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
    return _of_linear_layers(network, rates, forward, backward, saved, weights)


def _encoder(network: Network, rates: Rates) -> Minimum:
    """Norms stand behind the sums, so a norm's result is the stream: its codes serve the GEMM and its own backward."""
    shape = network.shape
    assert shape is not None
    rows = network.input[0] * network.input[1]
    wide, hidden = rows * shape.width, rows * shape.hidden
    weights = shape.width * (4 * shape.width + 2 * shape.hidden)
    # What comes in and what attention gives become codes; GELU writes its input's codes, too; two sums with a norm.
    codes = wide * (4 + 2) + wide * (2 + 2) + hidden * (2 + 1 + 2) + weights * (4 + 2)
    forward = codes + wide * (4 + 2 + 4 + 2) + wide * (4 + 2 + 4 + 1)
    # Each norm reads its gradient, the first also what its GEMM gave, and codes; GELU its gradient and codes; then the
    # gradients of q, k, v, and the last sum. Biases' gradients are sums in these kernels.
    norms = wide * (4 + 1 + 4 + 2) + wide * (4 + 2 + 1 + 4 + 2)
    backward = norms + hidden * (2 + 1 + 2) + 3 * wide * (2 + 2) + wide * (4 + 2 + 4)
    # Codes of the input, q, k, v, what attention gives and codes of that; the first norm's result in both layouts, since
    # its GEMM's weight wants one and the norm the other; codes of the second norm's, of GELU's input and of its result.
    saved = wide * (1 + 3 * 2 + 2 + 1 + 2 + 1) + hidden * (1 + 1) + weights
    return _of_linear_layers(network, rates, forward, backward, saved, weights)


def _of_linear_layers(network: Network, rates: Rates, forward: int, backward: int, saved: int, weights: int) -> Minimum:
    batch, tokens, width = network.input
    linear = 3 * 2.0 * batch * tokens * weights
    attention = 7 * 2.0 * batch * width * tokens**2 / 2  # half of the scores, as `estimate` takes it of all
    fastest = rates.flops.get("fp8", rates.flops["bfloat16"])
    seconds = (forward + backward) / rates.bytes + linear / fastest + attention / rates.fastest_attention
    return Minimum(forward, backward, saved, linear, attention, seconds)


@dataclass(frozen=True)
class Convolution:
    """Elements that one reads, makes and is made of; ``fan_in`` is what each result sums up."""

    inputs: int
    outputs: int
    weights: int
    fan_in: int

    @property
    def flops(self) -> float:
        return 2.0 * self.outputs * self.fan_in

    def seconds(self, rates: Rates) -> float:
        """Return those of the product, then of both gradients in one launch; many convolutions only move memory."""
        moved = (
            2 * (self.inputs + self.weights + self.outputs),
            2 * (2 * self.inputs + 2 * self.weights + self.outputs),
        )
        products = zip(moved, (1, 2), strict=True)
        return sum(max(b / rates.bytes, n * self.flops / rates.flops["bfloat16"]) for b, n in products)


def stage_convolutions(network: Network) -> list[list[Convolution]]:
    """Return the three convolutions of each block of `models.Stage`, and its projection."""
    batch, channels, height, width = network.input
    before, after = batch * height * width, batch * height * width // 4
    inner, outer = channels // 2, 2 * channels

    def block(outside: int, places: int) -> list[Convolution]:
        return [
            Convolution(outside * places, inner * places, outside * inner, outside),
            Convolution(inner * places, inner * after, 9 * inner * inner, 9 * inner),
            Convolution(inner * after, outer * after, inner * outer, inner),
            Convolution(outside * places, outer * after, outside * outer, outside),
        ]

    return [block(channels, before), *(block(outer, after) for _ in range(3))]


def _stage(network: Network, rates: Rates) -> Minimum:
    blocks = stage_convolutions(network)
    everything = [c for block in blocks for c in block]
    x, y = blocks[0][0].inputs, blocks[0][2].outputs
    weights, results = (sum(getattr(c, what) for c in everything) for what in ("weights", "outputs"))
    inner = sum(c.outputs for block in blocks for c in block[:2])
    # Bytes an element: 4 for what comes in and goes out and for weights, 2 for what convolutions read and write, 1 for
    # codes. All results are read for their statistics. Within a block, one is read again, written for the next
    # convolution, and stored. At its end two are read; their sum is written, and all three are stored.
    ends = len(blocks) * y * (2 * 2 + 2 + 3 * 1) + y * (4 - 2)
    forward = x * (4 + 2 + 1) + weights * (4 + 2) + results * 2 + inner * (2 + 2 + 1) + ends
    # A gradient and its codes are read twice, and a convolution's gradient written; at a block's end, three codes and
    # two gradients. What comes in there is float32 once, else it is summed of two, then written and read. What a
    # convolution multiplied is made of codes once more, for the projection the first one's.
    within = inner * (2 * (2 + 1) + 2)
    ends = len(blocks) * y * (2 * 3 * 1 + 2 * 2) + y * 2 * 4 + (len(blocks) - 1) * y * (2 * 2 + 2 + 2)
    made_again = sum(c.inputs for block in blocks for c in block[:3]) * (1 + 2)
    backward = within + ends + made_again + x * (2 * 2 + 4) + weights * (2 + 4)
    codes = x + results + len(blocks) * y
    seconds = (forward + backward) / rates.bytes + sum(c.seconds(rates) for c in everything)
    return Minimum(forward, backward, codes + 2 * weights, 0.0, 3 * sum(c.flops for c in everything), seconds)
