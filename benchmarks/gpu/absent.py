"""Inductor's code for a GPU that is not here: graphs lowered for CUDA, their code generated, its kernels compiled."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch._inductor.graph
import torch._inductor.scheduler
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor.debug import DebugContext
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from triton.backends.compiler import GPUTarget

import fxprec.driver.compilation
import fxprec.driver.half_compilation
from benchmarks.gpu.attention import choose_as_on_gpu
from fxprec.compat import constant_places_are_arguments, copied
from fxprec.config import Settings
from fxprec.config.processor import Processor
from fxprec.kernels.host import Reload
from fxprec.passes import narrow_gemms
from fxprec.passes.analysis import gemm_costs
from fxprec.passes.analysis.gemm_costs import Gpu
from fxprec.passes.lowering.lower import lower
from fxprec.passes.lowering.rows import WatchedRows
from fxprec.passes.narrow_attention import narrow_attention
from fxprec.passes.notice import Notice

CUDA = torch.device("cuda:0")
GPUS = {
    80: Gpu("NVIDIA A100-SXM4-80GB", (8, 0)),
    89: Gpu("NVIDIA L40S", (8, 9)),
    90: Gpu("NVIDIA H100 80GB HBM3", (9, 0)),
    100: Gpu("NVIDIA B200", (10, 0)),
}
_PROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148}  # streaming multiprocessors


def lowered_halves(
    patch: pytest.MonkeyPatch, step: Callable[[], object], lowering: str, arch: int
) -> list[GraphModule]:
    """Run ``step`` on the CPU with the reference lowering; return each half of its graphs as lowered for a GPU."""
    found: list[GraphModule] = []

    def both(gm: GraphModule, name: str, device: str, rows: WatchedRows, **options: Any) -> Any:
        twin = moved_to_cuda(copied(gm))
        lower(twin, lowering, "cuda", rows, **options)
        found.append(twin)
        return lower(gm, "eager", device, rows, **options)

    with patch.context() as here:
        plan_for(here, arch)
        here.setattr(fxprec.driver.half_compilation, "lower", both)
        step()
    return found


def plan_for(patch: pytest.MonkeyPatch, arch: int, *, traces_only: bool = False) -> None:
    """Let the passes decide as they would on a GPU of that architecture.

    ``traces_only``: attention is the GPU's operator, too, so that nothing of the graph can run.
    """
    refusal = "no casts" if arch < 89 else None
    patch.setattr(gemm_costs, "gpu_of", lambda device: GPUS[arch])
    patch.setattr(fxprec.driver.compilation.compat, "no_native_fp8", lambda device: refusal)
    patch.setattr(Processor, "here", lambda: Processor.parse("avx512+bf16+fp16"))
    patch.setattr(narrow_gemms, "SMALL", 0)  # what a CPU, on which the graph is traced, would keep in float32
    patch.setattr(narrow_gemms, "SHORT", 0)
    patch.setattr(fxprec.driver.compilation, "narrow_attention", partial(_narrow_on_gpu, arch if traces_only else None))


def _narrow_on_gpu(
    arch: int | None, gm: GraphModule, device: torch.device, settings: Settings, *, is_training: bool
) -> Notice | None:
    notice = narrow_attention(gm, CUDA, settings, is_training=is_training)
    if arch is not None:
        choose_as_on_gpu(gm, arch)
    return notice


def moved_to_cuda(gm: GraphModule) -> GraphModule:
    """Give a graph traced on the CPU values on a GPU, with nothing behind them; what the model makes moves too.

    What comes from host memory stays there.
    """
    mode = next(n.meta["val"].fake_mode for n in gm.graph.nodes if isinstance(n.meta.get("val"), FakeTensor))
    for node in gm.graph.nodes:
        if str(node.kwargs.get("device")) == "cpu":
            node.kwargs = {**node.kwargs, "device": CUDA}
        if node.target is torch.ops.prims.inductor_seeds.default:
            node.args = (node.args[0], CUDA)
        if node.op == "placeholder" and not any(
            user.target is Reload.target and user.args[0] is node for user in node.users
        ):
            node.meta["val"] = _on_cuda(node.meta["val"], mode)
    gm.recompile()
    propagate(gm)
    return gm


def propagate(gm: GraphModule) -> tuple[list[Any], FakeTensorMode]:
    """Give every node its value; return the inputs and their mode."""
    inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    mode: FakeTensorMode = next(v.fake_mode for v in inputs if isinstance(v, FakeTensor))
    with mode, torch.no_grad(), seeds_without_device():
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    return inputs, mode


@contextmanager
def seeds_without_device() -> Iterator[None]:
    """Infer a seed's shape without indexing the tensor of seeds, which asks for the GPU even where the tensor is fake."""

    def meta(seeds: torch.Tensor, index: int) -> torch._prims_common.TensorLike:
        return torch._prims.TensorMeta(seeds, shape=(), strides=())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.prims.inductor_lookup_seed.default, "prim_meta_impl", meta)
        yield


def _on_cuda(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape, strides = [int(s) for s in value.shape], [int(s) for s in value.stride()]
    return FakeTensor(mode, torch.empty_strided(shape, strides, dtype=value.dtype, device="meta"), CUDA)


def pretend(patch: pytest.MonkeyPatch, arch: int) -> None:
    """Answer Inductor's and Triton's questions about the device as a GPU of that architecture would."""
    limits = {"warp_size": 32, "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048}
    major, minor = GPUS[arch].capability
    facts = {"gcnArchName": "", "total_memory": 80 << 30, "multi_processor_count": _PROCESSORS[arch], **limits}
    device = SimpleNamespace(name=GPUS[arch].name, major=major, minor=minor, **facts)
    properties = DeviceProperties(
        type="cuda", index=0, multi_processor_count=_PROCESSORS[arch], cc=arch, major=major, **limits
    )
    patch.setattr(DeviceProperties, "create", lambda device: properties)
    patch.setattr(torch.cuda, "get_device_properties", lambda device=None: device_of(device))
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(CudaInterface.Worker, "get_device_properties", staticmethod(lambda device=None: device_of(device)))
    patch.setattr(torch._inductor.scheduler, "has_triton", lambda device=None: True)
    patch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: CUDA,
    )
    patch.setattr(triton.runtime.driver, "_active", driver)

    def device_of(asked: object) -> SimpleNamespace:
        return device


def inductor_code(gm: GraphModule, half: str = "") -> str:
    """Return the Python file that Inductor writes for a half of `lowered_halves`, Triton kernels included.

    ``half`` says which of a training step's it is, ``forward`` or ``backward``.
    """
    inputs, mode = propagate(gm)
    output = gm.graph.output_node()
    values = [n.meta.get("val") if isinstance(n, Node) else None for n in output.args[0]]  # type: ignore[union-attr]
    strides = [tuple(v.stride()) if isinstance(v, torch.Tensor) else None for v in values]
    output.meta |= {"original_output_strides": strides, "user_visible_output_idxs": []}
    inference = not half
    with tracing(TracingContext(mode)), V.set_fake_mode(mode), torch.no_grad():
        torch._inductor.compile_fx.view_to_reshape(gm)
        torch._inductor.compile_fx._recursive_post_grad_passes(gm, is_inference=inference)
        graph = torch._inductor.graph.GraphLowering(
            gm, example_inputs=inputs, graph_id=0, is_inference=inference, is_backward=half == "backward"
        )
        with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()), constant_places_are_arguments():
            graph.run(*inputs)
            code, _ = graph.codegen()
    return code if isinstance(code, str) else code.value


_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)


def compiled_kernels(code: str, folder: Path) -> Iterator[tuple[str, Any]]:
    """Compile every Triton kernel of Inductor's code to machine code; yield (its name, what Triton made of it).

    A kernel comes once for each configuration that would be tried. Raises what Triton raises.
    """
    made: list[Any] = []
    compile_ = triton.compile

    def recorded(*args: Any, **options: Any) -> Any:
        made.append(compile_(*args, **options))
        return made[-1]

    for name, source in _KERNEL.findall(code):
        path = folder / f"{name}.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton, "compile", recorded)
            getattr(module, name).precompile(warm_cache_only=True)
        yield from ((name, kernel) for kernel in made)
        made.clear()
