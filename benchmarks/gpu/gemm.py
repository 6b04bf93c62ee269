"""Row 2: the three GEMMs of a linear layer, quantisation included, at the shapes of Llama 3."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu.suite import Row, Setting
from benchmarks.gpu.timing import in_turn
from fxprec.ir.symbolic import AS_STORED, TABLE_COLUMNS
from fxprec.numerics.formats import parse
from fxprec.numerics.reference import reference_encode
from fxprec.runtime.gemm.matmul import Operand, matmul

WANTED = 1.7  # TransformerEngine's delayed scaling reports 1.69 on H200
# (in, out) of query/key/value, attention's output, gate/up and down.
LAYERS = {
    "8B": {"qkv": (4096, 6144), "out": (4096, 4096), "gate/up": (4096, 28672), "down": (14336, 4096)},
    "70B": {"qkv": (8192, 10240), "out": (8192, 8192), "gate/up": (8192, 57344), "down": (28672, 8192)},
}
TOKENS = (8192, 16384)
FORWARD, BACKWARD = "e4m3fn", "e5m2_sat"


def gemm(setting: Setting) -> Iterator[Row]:
    """Yield a row a shape, then the totals that issue 4 asks for; of a GPU without fp8 the generated GEMM's only."""
    if setting.no_fp8 is not None:
        yield from _generated(setting)
        return
    layers, tokens = LAYERS, TOKENS
    if setting.tiny:
        layers, tokens = {"8B": {"out": (64, 64)}}, (32,)
    for model, shapes in layers.items():
        for count in tokens:
            total: dict[str, float] = {}
            for name, (inner, outer) in shapes.items():
                took = in_turn(_sides(count, inner, outer, setting), setting.device, repeats=setting.repeats)
                total = {side: total.get(side, 0.0) + seconds for side, seconds in took.items()}
                flop = 6.0 * count * inner * outer
                detail = {"seconds": took, "tflop_per_s": {s: flop / t / 1e12 for s, t in took.items()}}
                ratio = took["bf16"] / took["fp8"]
                yield Row("gemm", f"Llama-3-{model} {name}, {count} tokens, fp8/bf16", ratio, "x", detail=detail)
            ratio = total["bf16"] / total["fp8"]
            met = ratio >= WANTED if model == "8B" else None
            detail = {"seconds": total, "limit": total["bf16"] / total["fp8 quantised"]}
            wanted = f">= {WANTED}" if model == "8B" else ""
            yield Row("gemm", f"Llama-3-{model} all, {count} tokens, fp8/bf16", ratio, "x", wanted, met, detail)
    yield from _generated(setting)


def _sides(tokens: int, inner: int, outer: int, setting: Setting) -> dict[str, Callable[[], object]]:
    """Forward and both backward products: bf16, fp8 from bf16 tensors, fp8 already quantised."""
    x, w, dy = (
        torch.randn(shape, device=setting.device, dtype=torch.bfloat16)
        for shape in ((tokens, inner), (outer, inner), (tokens, outer))
    )
    table = torch.zeros(2, TABLE_COLUMNS, dtype=torch.int32, device=setting.device)
    one = torch.ones((), device=setting.device)

    def cast(source: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
        q, t, _ = torch.ops.fxprec.quantize_transpose(source, table, 0, fmt, "native", False, True, True)
        return q, t

    def products(
        x2: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor], dy2: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        return (_scaled(x2[0], w2[0].t(), one), _scaled(dy2[0], w2[1].t(), one), _scaled(dy2[1], x2[1].t(), one))

    def fp8() -> tuple[Tensor, ...]:
        return products(cast(x, FORWARD), cast(w, FORWARD), cast(dy, BACKWARD))

    ready = cast(x, FORWARD), cast(w, FORWARD), cast(dy, BACKWARD)
    return {
        "bf16": lambda: (x @ w.t(), dy @ w, dy.t() @ x),
        "fp8": fp8,
        "fp8 quantised": lambda: products(*ready),
    }


def _scaled(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    return torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)


def _generated(setting: Setting) -> Iterator[Row]:
    """The generated GEMM over packed codes against decoding them and ``torch.mm``: what gemm_costs.json wants to know."""
    shapes = ((48, 64, 32),) if setting.tiny else ((16, 4096, 4096), (8192, 4096, 4096))
    fa, fb = parse("1-4-3+4"), parse("1-5-2")
    for m, k, n in shapes:
        a, b = (reference_encode(torch.randn(s), f).to(setting.device) for s, f in (((m, k), fa), ((n, k), fb)))
        decoded = _decoder(a, b, fa.name, fb.name, setting)
        wide = [torch.randn(s, device=setting.device, dtype=torch.bfloat16) for s in ((m, k), (k, n))]
        sides: dict[str, Callable[[], object]] = {
            "generated": lambda a=a, b=b: matmul(Operand(a, fa), Operand(b.t(), fb), dtype=torch.bfloat16),
            "decoded": decoded,
            "bf16": lambda wide=wide: wide[0] @ wide[1],
        }
        took = in_turn(sides, setting.device, repeats=setting.repeats)
        detail = {"seconds": took, "tflop_per_s": {s: 2.0 * m * n * k / t / 1e12 for s, t in took.items()}}
        yield Row(
            "gemm", f"packed {m}x{k}x{n}, generated/decoded", took["decoded"] / took["generated"], "x", detail=detail
        )


def _decoder(a: Tensor, b: Tensor, fa: str, fb: str, setting: Setting) -> Callable[[], object]:
    from benchmarks.gpu.fragments import compile_fragment

    def decode(a: Tensor, b: Tensor, table: Tensor) -> Tensor:
        wide = [
            torch.ops.fxprec.dequantize(q, table, AS_STORED, f, "packed", torch.bfloat16) for q, f in ((a, fa), (b, fb))
        ]
        return wide[0] @ wide[1].t()

    table = torch.zeros(2, TABLE_COLUMNS, dtype=torch.int32, device=setting.device)
    return compile_fragment(decode, (a, b, table), setting)
