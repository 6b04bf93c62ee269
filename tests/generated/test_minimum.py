"""The least a step moves, against ledgers of kernels: what each reads and writes, of tensors whose sizes torch tells."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is not installed

from benchmarks.gpu.models import Bottleneck
from benchmarks.gpu.roofline.estimate import A100, H100
from benchmarks.gpu.roofline.minimum import minimum
from benchmarks.gpu.roofline.sides import NETWORKS

FLOAT, HALF, CODE = 4, 2, 1


class Ledger:
    """Bytes that kernels read and write, and what is kept for backward. Nothing is read that nobody wrote."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.moved = {"forward": 0, "backward": 0}
        self.half = "forward"
        self.kept: set[str] = set()

    def given(self, **tensors: int) -> None:
        """What is there: of the caller, of a GEMM, of attention."""
        self.sizes |= tensors

    def kernel(self, *reads: str, **writes: int) -> None:
        if self.half == "backward":
            self.kept |= {name for name in reads if name in self.of_forward}
        self.moved[self.half] += sum(self.sizes[name] for name in reads) + sum(writes.values())
        self.sizes |= writes

    def library(self, *reads: str) -> None:
        """A GEMM or attention, which is not counted."""
        assert all(name in self.sizes for name in reads), reads
        if self.half == "backward":
            self.kept |= {name for name in reads if name in self.of_forward}

    def turn(self) -> None:
        self.half, self.of_forward = "backward", set(self.sizes)

    @property
    def saved(self) -> int:
        return sum(self.sizes[name] for name in self.kept)


def outputs_of(name: str) -> tuple[nn.Module, dict[str, tuple[int, int]], int]:
    """Run a network on the meta device; return (elements in, elements out) of its layers, and the input's elements."""
    network, sizes = NETWORKS[name], {}
    with torch.device("meta"):
        model = network.build()
        x = torch.empty(network.input)

    def note(layer: str):
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            sizes[layer] = (inputs[0].numel(), output.numel())

        return hook

    for layer, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d | Bottleneck):
            module.register_forward_hook(note(layer))
    model(x)
    return model, sizes, x.numel()


def codes(name: str, elements: int) -> dict[str, int]:
    """Codes of a tensor in both layouts, of which the second serves the gradient of the weight."""
    return {name: elements * CODE, f"{name}_t": elements * CODE}


def test_encoder_layer() -> None:
    model, sizes, n = outputs_of("bert")
    up, qkv = sizes["up"][1], sizes["qkv"][1]
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    book = Ledger()
    book.given(x=n * FLOAT, w=weights * FLOAT)
    book.kernel("w", **codes("w8", weights))
    book.kernel("x", **codes("x8", n))
    book.given(qkv=qkv * HALF, attended=n * HALF)
    book.kernel("attended", **codes("attended8", n))
    book.given(out=n * HALF)
    book.kernel("x", "out", x1=n * FLOAT, **codes("x18", n))
    book.given(up=up * HALF)
    book.kernel("up", up8=up * CODE, **codes("gelu8", up))
    book.given(down=n * HALF)
    book.kernel("x1", "down", y=n * FLOAT, y8=n * CODE)
    book.turn()
    book.given(dy=n * FLOAT)
    book.kernel("dy", "y8", ds2=n * FLOAT, **codes("ds2_8", n))
    book.library("ds2_8", "w8_t")
    book.library("ds2_8_t", "gelu8_t")
    book.given(dgelu=up * HALF)
    book.kernel("dgelu", "up8", **codes("dup8", up))
    book.library("dup8_t", "x18_t")
    book.given(dx1=n * HALF)
    # Norm 1's own input in codes, from which it normalizes again: the layout its GEMM's weight does not want.
    book.kernel("ds2", "dx1", "x18", ds1=n * FLOAT, **codes("ds1_8", n))
    book.library("ds1_8_t", "attended8_t")
    book.library("qkv", "attended")
    book.given(dq=n * HALF, dk=n * HALF, dv=n * HALF)
    book.kernel("dq", "dk", "dv", **codes("dqkv8", 3 * n))
    book.library("dqkv8_t", "x8_t")
    book.given(dx=n * HALF)
    book.kernel("ds1", "dx", dx_out=n * FLOAT)
    found = minimum(NETWORKS["bert"], H100)
    assert book.moved == {"forward": found.forward, "backward": found.backward}
    assert book.saved == found.saved
    tokens = NETWORKS["bert"].input[1]
    rows = n // model.qkv.in_features
    assert found.low_flops == 3 * 2 * rows * weights
    assert found.high_flops == 7 * 2 * n * tokens / 2


def convolutions(model: nn.Module, sizes: dict[str, tuple[int, int]]) -> Iterator[tuple[str, int, int, int, float]]:
    """Yield name, elements in and out, of the weight, and FLOPs."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            yield name, *sizes[name], module.weight.numel(), 2.0 * sizes[name][1] * module.weight[0].numel()


LAYERS = ("body.0", "body.3", "body.6", "shortcut.0")


def test_resnet_stage() -> None:
    model, sizes, n = outputs_of("resnet-stage")
    book = Ledger()
    found = list(convolutions(model, sizes))
    weights = sum(w for _, _, _, w, _ in found)
    book.given(x=n * FLOAT, w=weights * FLOAT)
    book.kernel("w", w16=weights * HALF)
    book.kernel("x", x16=n * HALF, x8=n * CODE)
    for block in "0123":
        end = sizes[block][1]
        for layer in LAYERS:
            name, size = f"{block}.{layer}", sizes[f"{block}.{layer}"][1]
            book.given(**{name: size * HALF})
            book.kernel(name)  # its statistics
            if layer in ("body.0", "body.3"):
                book.kernel(name, **{f"{name}_act": size * HALF, f"{name}_8": size * CODE})
        stored = {f"{name}_8": end * CODE for name in (block, f"{block}.body.6", f"{block}.shortcut.0")}
        out = {f"{block}_out": end * (FLOAT if block == "3" else HALF)}
        book.kernel(f"{block}.body.6", f"{block}.shortcut.0", **out, **stored)
    book.turn()
    book.given(g3=sizes["3"][1] * FLOAT)
    for block in "3210":
        end, ends = sizes[block][1], [f"{block}.body.6", f"{block}.shortcut.0"]
        stored = [f"{name}_8" for name in (block, *ends)]
        if block == "3":
            book.kernel("g3", *stored)  # the norms' sums
        else:  # and with them the sum of two gradients
            grads = [f"{int(block) + 1}.{layer}_dx" for layer in ("body.0", "shortcut.0")]
            book.kernel(*grads, *stored, **{f"g{block}": end * HALF})
        book.kernel(f"g{block}", *stored, **{f"{name}_g": end * HALF for name in ends})
        for layer, name in (("body.6", f"{block}.body.3"), ("body.3", f"{block}.body.0")):
            inside = sizes[f"{block}.{layer}"][0] * HALF
            book.kernel(f"{name}_8", **{f"{block}.{layer}_in": inside})
            book.given(**{f"{name}_dact": inside})
            book.kernel(f"{name}_dact", f"{name}_8")
            book.kernel(f"{name}_dact", f"{name}_8", **{f"{name}_g": inside})
        inside = sizes[f"{block}.body.0"][0] * HALF
        book.kernel("x8" if block == "0" else f"{int(block) - 1}_8", **{f"{block}.body.0_in": inside})
        book.given(**{f"{block}.{layer}_dx": inside for layer in ("body.0", "shortcut.0")})
    book.given(dw=weights * HALF)
    book.kernel("0.body.0_dx", "0.shortcut.0_dx", dx=n * FLOAT)
    book.library("w16")
    book.kernel("dw", dw32=weights * FLOAT)
    least = minimum(NETWORKS["resnet-stage"], H100)
    assert book.moved == {"forward": least.forward, "backward": least.backward}
    assert book.saved == least.saved
    assert least.low_flops == 0
    assert least.high_flops == 3 * sum(flops for *_, flops in found)
    seconds = (least.forward + least.backward) / H100.bytes
    for _, inside, outside, weight, flops in found:
        read, both = inside + weight + outside, 2 * inside + 2 * weight + outside
        seconds += max(read * HALF / H100.bytes, flops / 790e12) + max(both * HALF / H100.bytes, 2 * flops / 790e12)
    assert least.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("name", ["llama-8b", "llama-70b", "bert"])
def test_products_take_their_time_at_the_fastest_rate_there_is(name: str) -> None:
    least, slower = minimum(NETWORKS[name], H100), minimum(NETWORKS[name], A100)
    moved = least.forward + least.backward
    assert least.seconds == pytest.approx(
        moved / 3.0e12 + least.low_flops / 1340e12 + least.high_flops / (0.6 * 790e12)
    )
    assert slower.seconds == pytest.approx(
        moved / 1.6e12 + least.low_flops / 250e12 + least.high_flops / (0.6 * 250e12)
    )
