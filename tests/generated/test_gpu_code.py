"""What a GPU would run, from the captured graph to machine code, with no GPU: nothing on the CPU, nothing that fails."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

from backend_helpers import Cnn
from generated.test_gemm_training import Network

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks/ is not installed

from benchmarks.gpu.absent import compiled_kernels, inductor_code, lowered_halves, moved_to_cuda, pretend
from fxprec import Backend, Config, GradScaling
from fxprec.ir.symbolic import PACK_BITS, UNPACK_BITS
from fxprec.passes.lowering.bits import lower_bits

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION", "ignore:weigh-gemms", "ignore:storage=")


def step(
    make: Callable[[], nn.Module], shape: tuple[int, ...], estimate: str = "statistical", **options: Any
) -> Callable[[], None]:
    def run() -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        scaling = GradScaling(estimate=estimate, interval=2)
        config = Config(lowering="eager", low_ratio=1.0, promote_above=None, grad_scaling=scaling, **options)
        x: Tensor = torch.randn(shape)
        torch.compile(make(), backend=Backend(config))(x).square().mean().backward()

    return run


class Attention(nn.Module):
    """(batch, tokens, 16) to the same: layer norm, one head, residual adds, GELU; six GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(1, 2) * 0.25).softmax(-1) @ v)
        return x + self.down(nn.functional.gelu(self.up(x)))


def two_layers() -> nn.Module:
    """(batch, 16) to the same; six GEMMs. A block format's expansion is long: Inductor takes seconds a layer."""
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


class Loss(nn.Module):
    """(batch, 16) to a loss: a tensor of no dimensions is rounded and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layer(x), x)


def on_cpu(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    values = ((n, n.meta.get("val")) for n in gm.graph.nodes)
    return [n for n, v in values if isinstance(v, Tensor) and v.device.type == "cpu"]


FP8 = {"recipe": "fp8", "gemms": "low"}
PACKED = {"recipe": "hfp8", "storage": "packed"}
CASES = {
    "linear layers, H100": (Network, (32, 16), FP8 | {"estimate": "histogram"}, "auto", 90),
    "linear layers, A100": (two_layers, (32, 16), FP8, "auto", 80),
    "linear layers, H100, generated": (Network, (32, 16), FP8, "triton", 90),
    "a transformer block, A100, generated": (Attention, (2, 8, 16), PACKED, "triton", 80),
    "blocks, H100": (two_layers, (32, 16), {"recipe": "fp8+1-2-1/16:e4m3fn*", "gemms": "high"}, "auto", 90),
    "blocks, A100, generated": (two_layers, (32, 16), {"recipe": "fp8+int4/32:bf16", "gemms": "high"}, "triton", 80),
    "a loss, H100": (Loss, (32, 16), {"recipe": "hfp8", "storage": "simulate"}, "auto", 90),
    "a loss, H100, generated": (Loss, (32, 16), {"recipe": "hfp8", "storage": "simulate"}, "triton", 90),
    "convolutions, H100": (Cnn, (2, 3, 8, 8), PACKED, "auto", 90),
}


KEEPS_NAN = torch.torch_version.TorchVersion(torch.__version__) >= (2, 14)  # Inductor's own minima and maxima, always


def risks_bytes(ptx: str) -> bool:
    """Return whether a kernel has a minimum or maximum that keeps NaN; if Inductor writes such, beside byte stores.

    Beside transposed stores of bytes some GPUs get such a minimum wrong (triton issue 11111).
    """
    keeps_nan = re.search(r"\b(min|max)[.\w]*\.NaN", ptx) is not None
    return keeps_nan and (not KEEPS_NAN or re.search(r"\bst\.[.\w]*\.[bsu]8\b", ptx) is not None)


@pytest.mark.parametrize("case", CASES)
def test_both_halves_become_machine_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    make, shape, options, lowering, arch = CASES[case]
    monkeypatch.setattr(
        "fxprec.passes.lowering.triton.without_split_loops", lambda graph, regions: regions
    )  # all that can be made
    with torch._inductor.config.patch(fallback_random=True):  # Inductor's own makes tensors on the device
        halves = lowered_halves(monkeypatch, step(make, shape, **options), lowering, arch)
    assert len(halves) == 2, "forward and backward"
    pretend(monkeypatch, arch)
    for half in halves:
        code = inductor_code(half)
        assert not on_cpu(half), "one tensor on the CPU, and there are no CUDA graphs"
        kernels = list(compiled_kernels(code, tmp_path))
        names = [name for name, _ in kernels]
        assert names
        assert not [name for name, made in kernels if risks_bytes(made.asm["ptx"])]
        assert ("fxprec_" in " ".join(names)) == (lowering == "triton")
        assert not re.search(r"= empty_strided_cpu|device_str='cpu'|async_compile\.cpp", code), "all of it on the GPU"
        assert "torch.ops.fxprec." not in re.sub(
            r"^# .*$|torch\.ops\.fxprec\.(quantize_transpose|transpose_codes|matmul_\w+|histogram|totals|gathered)",
            "",
            code,
            flags=re.MULTILINE,
        )


def test_moments_take_the_gpus_own_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is right to the last bit takes a quarter of the instructions of a kernel that counts."""
    run = step(two_layers, (32, 16), recipe="fp8", gemms="low")
    _, backward = lowered_halves(monkeypatch, run, "inductor", 90)
    pretend(monkeypatch, 90)
    code = inductor_code(backward, "backward")
    assert "lg2.approx.f32" in code
    assert ".log(" not in code


def test_dropout_is_drawn_and_packed_in_one_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def dropout(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        bits = PACK_BITS(torch.ops.prims.inductor_random([64, 256], seed, "rand") > 0.1)
        return bits, torch.where(UNPACK_BITS(bits, [64, 256]), x, 0)

    gm = make_fx(dropout, tracing_mode="fake")(torch.randn(64, 256), torch.zeros((), dtype=torch.int64))
    lower_bits(gm.graph)
    pretend(monkeypatch, 90)
    code = inductor_code(moved_to_cuda(gm), "forward")
    assert code.count("async_compile.triton(") == 2, "one packs, one reads"
    assert code.count("empty_strided_cuda(") == 2, "the bits and the result"
    assert len(re.findall(r"rand4x\(|tl.rand\(", code)) == 8
    assert len(list(compiled_kernels(code, tmp_path))) >= 2


def deep(layers: int) -> nn.Module:
    """(batch, 16) to the same; four GEMMs a layer."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(layers)))


def test_equal_layers_share_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers read other rows of the table of scales: each launch says which.

    A place that 16 divides is a kernel of its own, since Inductor tells Triton of divisors.
    """

    def kernels(layers: int) -> int:
        halves = lowered_halves(monkeypatch, step(lambda: deep(layers), (32, 16), recipe="fp8"), "inductor", 90)
        with pytest.MonkeyPatch.context() as patch:
            pretend(patch, 90)
            code = "".join(inductor_code(gm, name) for gm, name in zip(halves, ("forward", "backward"), strict=True))
        assert not re.search(r"tl\.load\(in_ptr\d+ \+ \([1-9]", code), "no place is written into a kernel"
        assert len(places(code)) > layers, "different rows: a layer stores one copy"
        return code.count("async_compile.triton(")

    assert abs(kernels(4) - kernels(2)) <= 2


def places(code: str) -> set[str]:
    """Return the places that launches pass."""
    parameters = {name: args.split(", ") for name, args in re.findall(r"def (triton_\w+)\((.*)\):", code)}
    launches = [(parameters[name], args.split(", ")) for name, args in re.findall(r"(triton_\w+)\.run\((.*)\)", code)]
    return {arg for names, args in launches for name, arg in zip(names, args, strict=False) if "seed_offset" in name}
