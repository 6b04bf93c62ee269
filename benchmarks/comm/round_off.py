"""The paper's Table 9: round-off error of the summed gradient by group size, 256 simulated nodes, 1-5-2.

    python -m benchmarks.comm.round_off

Runs the exchange's own arithmetic (`accumulate`, `sum_fp32`) on all nodes' gradients in one process. Gradients are a
signal common to all nodes plus noise of each; `--noise` is the ratio, which sets the level of the curve.
Source: Han et al. 2020, Table 9 and equation 5.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import machine
from fxprec.runtime.aps.coder import Coder
from fxprec.runtime.aps.exchange import accumulate, split_messages, sum_fp32
from fxprec.runtime.aps.exponents import exponent_codes, factor_exponents, largest_magnitudes
from fxprec.runtime.aps.layout import layout
from fxprec.runtime.aps.wire import wire_of

PUBLISHED = {4: 55.0, 8: 44.21, 16: 41.83, 32: 49.62, 64: 58.21, 256: 85.22}  # percent


def gradients(nodes: int, elements: int, noise: float) -> Tensor:
    """(nodes, elements): a common signal and each node's own noise."""
    g = torch.Generator().manual_seed(0)
    signal = torch.randn(elements, generator=g) * 1e-3
    return signal + noise * 1e-3 * torch.randn(nodes, elements, generator=g)


def scaled(grads: Tensor, terms: int, top: int) -> tuple[Tensor, int]:
    """Gradients times 2^t, and t."""
    codes = exponent_codes(largest_magnitudes([grads]), terms)
    t = int(factor_exponents(codes, top)[0])
    return grads * 2.0**t, t


def hierarchical(grads: Tensor, group_size: int, fmt: str, kahan: bool = False) -> Tensor:
    """Sum in the format: each group in rank order, then the masters, element by element in ring order of chunk 0."""
    coder = Coder(wire_of(fmt), None, bounded=True)
    values, t = scaled(grads, len(grads), coder.wire.top)
    codes = [coder.encode(row) for row in values]
    if group_size < len(grads):
        parts = [codes[k : k + group_size] for k in range(0, len(codes), group_size)]
        codes = [coder.codes_of(accumulate(part, coder, kahan)) for part in parts]
    return accumulate(codes, coder, kahan) * 2.0**-t


def fp32_sums(grads: Tensor, fmt: str) -> Tensor:
    """Sum in float32 with two roundings, by the owners' own code."""
    nodes, elements = grads.shape
    coder = Coder(wire_of(fmt), None, bounded=True)
    values, t = scaled(grads, 1, coder.wire.top)
    lay = layout((elements,), nodes)
    codes = torch.stack([coder.encode(row) for row in values])
    codes = torch.cat([codes, codes.new_zeros(nodes, lay.padded - elements)], 1).view(nodes, nodes, lay.chunk)
    messages = [sum_fp32(codes[:, owner], coder, lay, owner) for owner in range(nodes)]
    received, second = split_messages(torch.stack(messages), lay)
    total = coder.decode(received)[: lay.total]
    for piece, exponent in zip(lay.pieces, second.tolist(), strict=True):
        total[piece.start : piece.end] *= 2.0**-exponent
    return total * 2.0**-t


def errors(found: Tensor, exact: Tensor) -> dict[str, float]:
    """Equation 5 in percent (elements that are not zero), and the relative L2 error in percent."""
    relative = ((found.double() - exact) / exact).abs()
    l2 = (found.double() - exact).norm() / exact.norm()
    return {"round_off_percent": float(relative.mean() * 100), "l2_percent": float(l2 * 100)}


def measure(nodes: int, elements: int, noise: float, fmt: str) -> dict[str, dict[str, float]]:
    grads = gradients(nodes, elements, noise)
    exact = grads.double().sum(0)
    sizes = [size for size in (2, 4, 8, 16, 32, 64, 128, 256) if size <= nodes]
    found = {str(size): errors(hierarchical(grads, size, fmt), exact) for size in sizes}
    found["kahan, one ring"] = errors(hierarchical(grads, nodes, fmt, kahan=True), exact)
    found["fp32 sums"] = errors(fp32_sums(grads, fmt), exact)
    return found


def plot(rows: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 4))
    axes.plot(list(PUBLISHED), list(PUBLISHED.values()), "k--o", label="paper, Table 9 (ResNet-50)")
    for noise, found in rows.items():
        sizes = [int(size) for size in found if size.isdigit()]
        (line,) = axes.plot(sizes, [found[str(s)]["l2_percent"] for s in sizes], "-o", label=f"noise/signal {noise}")
        axes.axhline(found["fp32 sums"]["l2_percent"], color=line.get_color(), linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("group size, 256 nodes, 1-5-2 (dotted: sums in fp32)")
    axes.set_ylabel("round-off error, relative L2, %")
    axes.set_ylim(0)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--elements", type=int, default=64 * 3 * 7 * 7)
    parser.add_argument("--noise", type=float, nargs="+", default=[0.1, 1.0, 4.0])
    parser.add_argument("--format", default="1-5-2")
    args = parser.parse_args()
    rows = {str(noise): measure(args.nodes, args.elements, noise, args.format) for noise in args.noise}
    for noise, found in rows.items():
        print("noise/signal", noise)
        for name, row in found.items():
            print(f"  {name:16} eq. 5 {row['round_off_percent']:8.2f} %   L2 {row['l2_percent']:6.2f} %")
    title = {"nodes": args.nodes, "elements": args.elements, "format": args.format, "published_percent": PUBLISHED}
    saved = machine.save("aps-round-off", {**title, "by_noise_ratio": rows})
    plot(rows, saved.with_suffix(".png"))
    print(saved)


if __name__ == "__main__":
    main()
