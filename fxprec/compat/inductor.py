"""Inductor's compilers, decompositions, passes, operators and C++ builder."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import sympy
import torch
from torch._inductor import codecache, config, inductor_prims, list_mode_options
from torch._inductor import compile_fx as _compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._ops import OpOverload
from torch._prims_common import make_channels_last_2d_strides_for
from torch.fx import Graph

F = TypeVar("F", bound=Callable[..., object])


compile_fx: Callable[..., Any] = _compile_fx.compile_fx
compile_fx_inner: Callable[..., Any] = _compile_fx.compile_fx_inner


SEEDED_RANDOM: object = inductor_prims.random  # (size, seed, mode, *, align_dtype); run op by op, it ignores the seed
SEEDED_RANDINT: object = inductor_prims.randint  # (low, high, size, seed), likewise


FORCE_STRIDES: OpOverload = torch.ops.prims.inductor_force_stride_order.default  # (x, strides)


def writes_in_place(joins: object) -> None:
    """Make Inductor compute each piece of ``joins(pieces)`` directly in its part of the result.

    Inductor's lowering of ``cat`` depends on the pieces: it recomputes pointwise pieces in a kernel over the whole.
    """
    from torch._inductor import ir, lowering

    def join(pieces: Sequence[ir.TensorBox]) -> ir.TensorBox:
        return ir.TensorBox(ir.ConcatKernel.create(pieces, len(pieces[0].get_size()) - 1))

    if joins not in lowering.lowerings:
        lowering.register_lowering(joins, type_promotion_kind=None)(join)


def writes_after_reading(writes: object) -> None:
    """Make Inductor compute pending reads of the first argument of ``writes`` before the argument is written.

    Inductor does this for any operator that writes, but after the write. So a pointwise value that is not in memory yet
    would read the new contents (torch 2.13).
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    fallback = lowering.fallback_handler(writes, add_to_fallback_set=False)

    def write(written: ir.TensorBox, *args: object) -> object:
        V.graph.mark_buffer_mutated(written.get_name())
        return fallback(written, *args)

    if writes not in lowering.lowerings:
        lowering.register_lowering(writes, type_promotion_kind=None)(write)


def forget_mutation_regions(graph: Graph) -> None:
    """Make Inductor find anew between which writes each node lies; call this after a write is moved.

    Its patterns join nodes of one region only, for instance a product and a sum. Nodes keep the regions that they had
    in the joint graph, where all writes are at the end.
    """
    for node in graph.nodes:
        node.meta.pop("mutation_region_id", None)


def lies_in_memory(keeps: object) -> None:
    """Make Inductor store the result of ``keeps(x)`` in its own buffer, which is not part of another buffer."""
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    def realized(x: object) -> object:
        copy = lowering.clone(x)
        copy.realize()
        buffer = copy.data.data
        buffer.decide_layout()  # a concat makes buffers without a fixed layout part of itself
        V.graph.no_fuse_buffer_names.add(buffer.get_name())  # nor may a loop that reads the buffer fuse with it
        return copy

    if keeps not in lowering.lowerings:
        lowering.register_lowering(keeps, type_promotion_kind=None)(realized)


def takes_approximate_logarithm(logarithm: object) -> None:
    """Make Inductor's code for a GPU compute the natural ``logarithm(x)`` with the GPU's approximate instruction."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import ops

    exact: Callable[[ir.TensorBox], ir.TensorBox] = lowering.lowerings[torch.ops.aten.log.default]

    def approximate(x: ir.TensorBox) -> ir.TensorBox:
        if x.get_device_or_error().type != "cuda":
            return exact(x)
        load = x.make_loader()

        def log(index: Sequence[sympy.Expr]) -> Any:
            binary = ops.inline_asm_elementwise(
                load(index), asm="lg2.approx.f32 $0, $1;", constraints="=f,f", dtype=torch.float32
            )
            return ops.mul(binary, ops.constant(_LN_2, torch.float32))

        return ir.Pointwise.create(device=x.get_device(), dtype=torch.float32, inner_fn=log, ranges=list(x.get_size()))

    if logarithm not in lowering.lowerings:
        lowering.register_lowering(logarithm, type_promotion_kind=None)(approximate)


_LN_2 = 0.6931471805599453


def decompositions() -> dict[OpOverload, Callable[..., object]]:
    """Return Inductor's decompositions."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def whole_gemms() -> dict[OpOverload, Callable[..., object]]:
    """Return Inductor's decompositions without those that turn small GEMMs into sums of products."""
    gemms = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)
    return {op: f for op, f in decompositions().items() if getattr(op, "overloadpacket", op) not in gemms}


def boxed(function: F) -> F:
    """Mark a graph's callable as taking its inputs in one list, which the callable may empty; return the callable."""
    vars(function)["_boxed_call"] = True
    return function


class GraphPass(CustomGraphPass):
    """A joint-graph pass made of a function. ``key`` identifies the function's behaviour for Inductor's code cache."""

    def __init__(self, function: Callable[[Graph], None], key: str) -> None:
        self.function, self.key = function, key

    def __call__(self, graph: Graph) -> None:
        """Run the pass on Inductor's joint graph."""
        self.function(graph)

    def __deepcopy__(self, memo: object) -> GraphPass:
        return self  # tracing ``scan`` deep-copies Inductor's config, and must not copy the model

    def uuid(self) -> str:
        """Return the key for Inductor's code cache."""
        return self.key


@contextlib.contextmanager
def code_keyed_by(key: str) -> Iterator[None]:
    """Make Inductor's code cache identify the joint-graph passes, which have already run, by ``key`` alone.

    The cache looks up graphs in their state after the passes. ``key`` must cover all else that affects their code.
    """
    done = GraphPass(lambda graph: None, key)
    with config.patch(joint_custom_pre_pass=done, joint_custom_post_pass=None):
        yield


def mode_settings(mode: str) -> dict[str, object]:
    """Return the settings of Inductor's config for a mode of ``torch.compile``."""
    return dict(list_mode_options(mode))


def makes_cuda_graphs(mode: str) -> bool:
    """Return whether Inductor records CUDA graphs in a mode, because of the mode or of its config."""
    return bool(mode_settings(mode).get("triton.cudagraphs", config.triton.cudagraphs))


ROUNDED_AT_EVERY_OPERATOR: dict[str, object] = {"emulate_precision_casts": True}
"""Inductor's setting that rounds a 16-bit value to 16 bits between two operators of one kernel, as memory would."""


def hand_on_inputs(graph: Graph) -> None:
    """Make Inductor return inputs that are also results, such as weights that backward reads, without a copy.

    Inductor copies such an input to channels last if convolutions read it, so float32 weights would be in memory twice
    for a whole step.
    """
    output = graph.output_node()
    results: Any = output.args[0]
    own = {i for i, node in enumerate(results) if getattr(node, "op", None) == "placeholder"}
    output.meta["user_visible_output_idxs"] = sorted(own.union(output.meta.get("user_visible_output_idxs", ())))


def trim_output_strides(num_outputs: int) -> None:
    """Forget the strides of outputs that fxprec appended, as AOTAutograd takes the last outputs for saved tensors."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        del context.output_strides[num_outputs:]


def waits_for_collectives() -> frozenset[OpOverload]:
    """Return the operators that wait for a collective's result; none without ``torch.distributed``."""
    packet = getattr(torch.ops._c10d_functional, "wait_tensor", None)
    return frozenset() if packet is None else frozenset({packet.default})


def channels_last_strides(shape: Sequence[int | torch.SymInt]) -> list[int]:
    """Return the strides of a channels-last tensor (batch, channels, height, width)."""
    return [int(stride) for stride in make_channels_last_2d_strides_for(shape)]


def cache_folder() -> str:
    """Return the folder of Inductor's caches, ``TORCHINDUCTOR_CACHE_DIR`` if set."""
    return str(codecache.cache_dir())  # type: ignore[attr-defined]


def unwritable_cache(error: BaseException | None) -> str | None:
    """Return a message that Inductor's cache folder cannot be used, if an error or its cause is of that; else None."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # Inductor sets it if the user does not
    while error is not None:
        name = error.filename if isinstance(error, OSError) else None
        if folder and isinstance(name, str) and os.path.abspath(name).startswith(os.path.abspath(folder)):
            why = error.strerror if isinstance(error, OSError) else ""
            return (
                f"Inductor's cache folder {folder} cannot be used ({why}: {name}); set TORCHINDUCTOR_CACHE_DIR to one "
                "that this process may write"
            )
        error = error.__cause__ or error.__context__
    return None


def build_cpp(source: str, flags: Sequence[str]) -> ctypes.CDLL:
    """Compile C++ for the CPU with Inductor's builder, or load it from its cache. Raises what the builder raises."""
    library: ctypes.CDLL = codecache.CppCodeCache.load(source, device_type="cpu", extra_flags=tuple(flags))
    return library
