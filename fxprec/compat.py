"""Everything that depends on the torch or Triton version, in one place (torch 2.11 to 2.13)."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
import torch._dynamo.convert_frame
import torch._dynamo.utils
import torch._functorch.config
import torch._guards
import torch._inductor.config
import torch._logging._internal
import torch.fx.traceback
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.convert_frame import ConvertFrameAssert
from torch._dynamo.convert_frame import compile_lock as compile_lock
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import BackendCompilerFailed, RestartAnalysis, ShortenTraceback, Unsupported, UserError
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor import compile_fx as _compile_fx
from torch._inductor import inductor_prims, list_mode_options
from torch._inductor.codecache import CppCodeCache, PyCodeCache
from torch._inductor.codegen import cpp as _cpp
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._prims_common import make_channels_last_2d_strides_for
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, _CheckpointFrame

F = TypeVar("F", bound=Callable[..., Any])

compile_fx: Callable[..., Any] = _compile_fx.compile_fx
compile_fx_inner: Callable[..., Any] = _compile_fx.compile_fx_inner


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def whole_gemms() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions without those that make sums of products of small GEMMs."""
    gemms = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)
    return {op: f for op, f in decompositions().items() if getattr(op, "overloadpacket", op) not in gemms}


def boxed(function: F) -> F:
    """Return a graph's callable, marked as taking its inputs in one list, which it may empty."""
    vars(function)["_boxed_call"] = True
    return function


class GraphPass(CustomGraphPass):
    """A joint-graph pass from a function; ``key`` names what it depends on, for Inductor's code cache."""

    def __init__(self, function: Callable[[Graph], None], key: str) -> None:
        self.function, self.key = function, key

    def __call__(self, graph: Graph) -> None:
        self.function(graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphPass:
        return self  # ``scan`` copies Inductor's config as it is traced, and the model is no part of it

    def uuid(self) -> str:
        return self.key


@contextlib.contextmanager
def uncached_autograd() -> Iterator[None]:
    """Switch off AOTAutograd's cache: a hit would skip our passes, and with them the plan."""
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@contextlib.contextmanager
def backward_at_once() -> Iterator[None]:
    """Compile the backward half with the forward half and let its errors out; else the first backward meets them."""
    name = "force_non_lazy_backward_lowering"
    with torch._functorch.config.patch({name: True} if hasattr(torch._functorch.config, name) else {}):
        yield


@dataclass(frozen=True)
class Ambient:
    """The state of a thread that decides what tracing a graph gives: guarded by Dynamo, restored to compile again."""

    grad: bool
    inference: bool
    dtype: torch.dtype
    autocast: tuple[tuple[str, torch.dtype, bool], ...]  # device type, its dtype, whether on

    @classmethod
    def now(cls, device: torch.device) -> Ambient:
        devices = dict.fromkeys(("cpu", device.type))
        autocast = tuple((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices)
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), autocast)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put it in force; what a compilation that fails leaves behind is undone at the end."""
        before = torch.get_default_dtype()
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(self.dtype)
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled))
            yield


def mode_settings(mode: str) -> dict[str, Any]:
    """Return what a mode of ``torch.compile`` sets in Inductor's config."""
    return dict(list_mode_options(mode))


def current_fake_mode() -> FakeTensorMode | None:
    """Return the fake mode of the compilation under way, or None outside one."""
    context = torch._guards.TracingContext.try_get()
    return None if context is None else context.fake_mode


def fake_mode_of(value: object) -> FakeTensorMode | None:
    """Return the mode a fake tensor belongs to, or None for anything else."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


@contextlib.contextmanager
def tracing_with(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Compile outside of Dynamo under the fake mode, and so the symbolic shapes, of an earlier compilation."""
    with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
        yield


def memory_budget(graph: Graph) -> float:
    """Return the ``activation_memory_budget`` a joint graph is partitioned under: 1 saves all that is worth it.

    As the partitioner reads it: the config, an old marker on nodes, the annotation of a region around the graph.
    """
    budget = float(torch._functorch.config.activation_memory_budget)
    marked = (n.meta["memory_budget"] for n in graph.nodes if isinstance(n.meta.get("memory_budget"), float))
    budget = next(marked, budget)
    return next((b for n in graph.nodes if (b := _annotated_budget(n)) is not None), budget)


def keep_random_numbers(graph: Graph) -> None:
    """Under a memory budget, have what is random saved: recomputed, a dropout would draw another mask (torch 2.13).

    Of a random number that Inductor generates that is its seed. A budget of 0 would save nothing whatever is marked.
    """
    budget = memory_budget(graph)
    if budget == 1:
        return
    drawn = [n for n in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    for node in drawn:
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    if budget == 0 and drawn:
        for node in graph.nodes:
            node.meta["memory_budget"] = _NEXT_TO_NOTHING
            if _annotated_budget(node) is not None:
                node.meta["custom"] = {**node.meta["custom"], _BUDGET_KEY: _NEXT_TO_NOTHING}


_NEXT_TO_NOTHING = 1e-9
_BUDGET_KEY = getattr(torch.fx.traceback, "MEMORY_BUDGET_ANNOTATION_KEY", "memory_budget")


def annotate_budget(graph: Graph, known: Collection[Node]) -> None:
    """Give nodes that are not ``known`` the annotation of the others: the partitioner wants it on every node."""
    annotated = next((n for n in graph.nodes if _annotated_budget(n) is not None), None)
    if annotated is not None:
        for node in graph.nodes:
            if node not in known and node.op == "call_function":
                node.meta["custom"] = {**annotated.meta["custom"], **node.meta.get("custom", {})}


_annotated_budget: Callable[[Any], float | None] = getattr(
    torch.fx.traceback, "_get_memory_budget_annotation", lambda node: None
)


def in_backward() -> bool:
    """Say whether autograd is running a backward pass on this thread: a forward is then a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def backward_id() -> int:
    """Return the number of the backward pass under way, -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def checkpoint_around() -> tuple[object, Hashable | None] | None:
    """Return what stands for the non-reentrant checkpoint around a call, and which recomputation of it this is.

    The same object in forward, where the second is None, and in recomputation. None outside of such a checkpoint.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = None if hooks is None else inspect.unwrap(hooks[0])
    code, cells = getattr(pack, "__code__", None), getattr(pack, "__closure__", None)
    if code is None or cells is None:
        return None
    known = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    if isinstance(known.get("frame"), _CheckpointFrame):
        return known["frame"], None
    frame = known["target_frame_ref"]() if "target_frame_ref" in known else None
    return None if frame is None else (frame, known["gid"])


def trim_output_strides(num_outputs: int) -> None:
    """Forget the strides of outputs we appended: AOTAutograd takes the tail for saved tensors."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        del context.output_strides[num_outputs:]


def traces_artifacts() -> bool:
    """Say whether torch's structured trace (``TORCH_TRACE``, read by ``tlparse``) is on."""
    return bool(torch._logging._internal.trace_log.handlers)


def trace_artifact(name: str, encoding: str, payload: str) -> None:
    """Add a file to the structured trace of the compilation under way. ``encoding`` is "string" or "json"."""
    torch._logging._internal.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: payload
    )


def debug_folder() -> str | None:
    """Return where torch writes under ``TORCH_COMPILE_DEBUG=1``, or None where that is not set."""
    return torch._dynamo.utils.get_debug_dir() if torch._inductor.config.trace.enabled else None


SEEDED_RANDOM: Any = inductor_prims.random  # (size, seed, mode, *, align_dtype); run op by op, it ignores the seed
SEEDED_RANDINT: Any = inductor_prims.randint  # (low, high, size, seed), likewise

is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


FORCE_STRIDES: Any = torch.ops.prims.inductor_force_stride_order.default  # (x, strides)


def channels_last_strides(shape: Sequence[int | torch.SymInt]) -> list[int]:
    """Return the strides of a channels-last tensor (batch, channels, height, width)."""
    return [int(stride) for stride in make_channels_last_2d_strides_for(shape)]


def build_cpp(source: str, flags: Sequence[str]) -> ctypes.CDLL:
    """Compile C++ for the CPU with Inductor's builder, or take it from its cache. Raises what the builder raises."""
    library: ctypes.CDLL = CppCodeCache.load(source, device_type="cpu", extra_flags=tuple(flags))
    return library


@contextlib.contextmanager
def tiles_for_bytes() -> Iterator[None]:
    """Have C++ loops over 8-bit codes walk as many elements at once as a vector of float32 has.

    Beside 16-bit floats alone they would walk twice as many, for which the conversions of codes are scalar: 1 ns an
    element for 0.2 (torch 2.13, AVX-512).
    """
    code: Any = _cpp
    if not all(hasattr(code, name) for name in ("TilingSelect", "_get_dtype_from_loopbodies", "_get_loop_body")):
        yield
        return
    selector = code.TilingSelect
    select = selector.select_tiling

    def select_for_bytes(self: Any, functions: Any, sizes: Any) -> Any:
        factors, *rest = select(self, functions, sizes)
        if factors and not _BYTES.isdisjoint(code._get_dtype_from_loopbodies(code._get_loop_body(functions))):
            widest = pick_vec_isa().nelements(dtype=torch.float32)
            factors = [min(factor, widest) for factor in factors]
        return (factors, *rest)

    selector.select_tiling = select_for_bytes
    try:
        yield
    finally:
        selector.select_tiling = select


_BYTES = frozenset({torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2})


def cause_of_no_code(error: Exception) -> str | None:
    """Return the first line of why a ``torch.compile``d function got no code, or None for any other error."""
    return str(error.inner_exception).partition("\n")[0] if isinstance(error, BackendCompilerFailed) else None


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Write nothing into torch's structured trace, which would have every graph serialised."""
    log = torch._logging._internal.trace_log
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class TritonCalls:
    """Calls of Triton kernels as graph nodes: the operator Dynamo itself writes for a user's kernel."""

    target = triton_kernel_wrapper_functional

    def keywords(
        self, source: str, name: str, programs: object, arguments: dict[str, object], written: list[str]
    ) -> dict[str, Any]:
        """Return the operator's keyword arguments. The source is kept in Inductor's cache folder."""
        return {
            "kernel_idx": kernel_side_table.add_kernel(load_kernel(source, name)),
            "constant_args_idx": kernel_side_table.add_constant_args({}),
            "grid": [(programs, 1, 1)],
            "tma_descriptor_metadata": {},
            "kwargs": arguments,
            "tensors_to_clone": written,
        }


def load_kernel(source: str, name: str) -> Any:
    """Return the Triton function ``name`` of generated ``source``."""
    return getattr(PyCodeCache.load(source), name)


OLDEST_TRITON = (3, 6)


def triton_interprets() -> bool:
    """Say whether Triton, which is installed, runs kernels in its interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def runs_in_interpreter(kernel: object) -> bool:
    """Say whether a Triton function was made for the interpreter."""
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(kernel, InterpretedFunction)


def no_triton(device: torch.device) -> str | None:
    """Say why generated Triton kernels cannot run on ``device``, or None where they can."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        return f"Triton {triton.__version__} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    interpreted = triton_interprets()
    if device.type == "cpu":
        why = "a CPU runs Triton kernels in Triton's interpreter only, which TRITON_INTERPRET=1 chooses at start"
        return None if interpreted else why
    if interpreted:
        return "TRITON_INTERPRET=1 keeps Triton from compiling for a GPU"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"compute capability {major}.{minor} is below 8.0"


OLDEST_WITH_FP8 = (8, 9)


def no_native_fp8(device: torch.device) -> str | None:
    """Say why Inductor's code cannot hold 8-bit float dtypes on ``device``, or None where it can."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= OLDEST_WITH_FP8:
        return None
    return f"compute capability {major}.{minor} has no casts to 8-bit floats"


def compile_triton(
    kernel: Any,
    kinds: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: Iterable[int],
    arch: int,
    options: Mapping[str, Any],
) -> Any:
    """Compile a Triton function for an NVIDIA architecture (80, 89, 90, 100), with no GPU.

    ``kinds``: Triton's type of each parameter; ``aligned``: positions of those divisible by 16. The result has ``asm``
    (``"ptx"``, ``"cubin"``) and ``metadata.shared`` (bytes). Raises what Triton's compiler raises.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, dict(kinds), dict(constants), attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(options))


def current_architecture() -> int:
    """Return the current GPU's compute capability: 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def triton_tool(name: str) -> Path:
    """Return a program that comes with Triton: ``cuobjdump``, ``ptxas``."""
    from triton.backends import nvidia

    return Path(str(nvidia.__file__)).parent / "bin" / name


def calling_wrapper() -> object | None:
    """Return the ``torch.compile(backend="...")`` wrapper that is calling the string-named backend."""
    return next(_callers(torch._TorchCompileWrapper), None)


def _callers(kind: type) -> Iterator[Any]:
    """Yield the objects of a class whose methods are calling, the innermost first.

    Other frames are not asked for their locals: Python would keep a copy of them, a user's first batch among them,
    for as long as the function runs.
    """
    codes = {code for name in vars(kind) if (code := getattr(getattr(kind, name), "__code__", None))}
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code in codes and isinstance(found := frame.f_locals.get("self"), kind):
            yield found
        frame = frame.f_back


class TraceAgain(RestartAnalysis, ShortenTraceback):
    """Asks Dynamo to trace the frame once more; of these two types, it lets one pass and acts on the other."""

    def __init__(self, reason: str) -> None:
        Exception.__init__(self, reason)
        self.restart_reason, self.first_useful_frame = reason, None


def widen_ddp_buckets() -> bool:
    """Say whether Dynamo's DDP optimizer is calling us with a piece of a graph; if so, it cuts this one no more.

    Raise `TraceAgain` then: the second time the graph comes whole. Each frame has an optimizer of its own.
    """
    for optimizer in _callers(DDPOptimizer):
        cut = len(optimizer.buckets) > 1
        optimizer.bucket_bytes_cap = optimizer.first_bucket_cap = sys.maxsize
        return cut
    return False


def count_recompiles_per_model(
    counts_of: Callable[[object], Counter[int] | None], hit: Callable[[object, str, str], None]
) -> None:
    """Hold Dynamo's recompile limits against each model alone, and call ``hit(backend, code, limit)`` at one.

    Dynamo counts what all models compiled for a code object. That suits backends that compare equal, whose models
    share code; ours do not, and the ninth block of a network would run uncompiled. ``counts_of`` returns a backend's
    compilations by frame, or None for backends that are not ours, which keep Dynamo's count.
    """
    dynamo: Any = torch._dynamo.convert_frame
    exceeds: Callable[[Any, Any], tuple[bool, str]] = dynamo.exceeds_recompile_limit

    def exceeds_for_this_model(cache_size: Any, compile_id: Any) -> tuple[bool, str]:
        caller = sys._getframe(1).f_locals
        code, backend = caller.get("code"), _innermost_backend(caller.get("compiler_fn"))
        counts = counts_of(backend)
        if counts is None or not isinstance(code, CodeType):
            return exceeds(cache_size, compile_id)
        own = sum(e.backend is backend or e.backend == backend for e in _debug_get_cache_entry_list(code))
        sizes = {f.name: min(own, getattr(cache_size, f.name)) for f in fields(cache_size)}
        id_ = replace(compile_id, frame_compile_id=counts[compile_id.frame_id])
        counts[compile_id.frame_id] += 1
        exceeded, limit = exceeds(replace(cache_size, **sizes), id_)
        if exceeded:
            hit(backend, _named(code), f"{limit} ({getattr(torch._dynamo.config, limit)})")
        return exceeded, limit

    dynamo.exceeds_recompile_limit = exceeds_for_this_model


def watch_frames_left_uncompiled(tell: Callable[[object, str, object, str], None]) -> None:
    """Call ``tell(backend, code, owner, reason)`` for a frame that Dynamo gives up and runs as written.

    ``owner`` is the frame's first argument, the module whose method it mostly is. Dynamo says it in its log only, and
    what the frame itself computes never reaches a backend. A recompile limit is told by `count_recompiles_per_model`.
    """
    convert = ConvertFrameAssert.__call__

    def convert_and_watch(self: Any, frame: Any, *args: Any, **options: Any) -> Any:
        try:
            return convert(self, frame, *args, **options)
        except (Unsupported, UserError) as error:
            reason = _reason_of(error)
            if not frame.f_code.co_flags & _GENERATORS and _LIMIT not in reason:  # a generator is never compiled
                owner = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
                tell(_innermost_backend(self._torchdynamo_orig_backend), _named(frame.f_code), owner, reason)
            raise

    ConvertFrameAssert.__call__ = convert_and_watch  # type: ignore[method-assign]


def watch_graph_breaks(tell: Callable[[object, str, str], None]) -> None:
    """Call ``tell(backend, code, reason)`` for a frame that Dynamo compiles in pieces, once a break."""
    convert, counters = ConvertFrameAssert.__call__, torch._dynamo.utils.counters

    def convert_and_watch(self: Any, *args: Any, **options: Any) -> Any:
        before = Counter(counters["graph_break"])
        result = convert(self, *args, **options)
        for reason in counters["graph_break"] - before:
            heading = reason.strip().partition("\n")[0]
            tell(_innermost_backend(self._torchdynamo_orig_backend), _named(args[0].f_code), heading)
        return result

    ConvertFrameAssert.__call__ = convert_and_watch  # type: ignore[method-assign]


_LIMIT = "recompile limit exceeded"
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _reason_of(error: Exception) -> str:
    """Return the headings of Dynamo's long message: the first break, and what made it give up the frame."""
    lines = [line.strip() for line in str(error).splitlines() if line[:1].strip()]
    headings = [
        line for line in lines if not line.startswith(("***", "Failed to handle", "from user code", "Set TORCH"))
    ]
    reason = ", then ".join(dict.fromkeys(headings[:2])) or type(error).__name__
    hint = next(
        (line.partition("Hint: ")[2] for line in str(error).splitlines() if "Hint: Set torch._dynamo" in line), ""
    )
    return f"{reason} ({hint})" if hint else reason


def _named(code: CodeType) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def _innermost_backend(target: object) -> object:
    while (inner := getattr(target, "_torchdynamo_orig_backend", None)) is not None:
        target = inner
    return target


def wrapper_of(compiled: object) -> object | None:
    """Return the backend callable, or string wrapper, inside what ``torch.compile`` returned."""
    return _innermost_backend(_callback(compiled))


def _callback(compiled: object) -> object | None:
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled  # a module after module.compile()
    context = getattr(compiled, "dynamo_ctx", None)  # a compiled module
    if context is not None:
        return getattr(context, "callback", None)
    for cell in getattr(compiled, "__closure__", None) or ():  # a compiled function
        if hasattr(cell.cell_contents, "_torchdynamo_orig_backend"):
            return cell.cell_contents  # type: ignore[no-any-return]
    return None


def through_dynamo(error: Exception) -> Exception:
    """Return ``error`` as a type Dynamo lets pass: it wraps others in ``BackendCompilerFailed``.

    The result is still an instance of the error's own type, so ``except fxprec.ConfigError`` works.
    """
    kind = type(error)
    message = str(error)  # Dynamo appends advice on its own debugging to args
    space = {"__module__": kind.__module__, "__str__": lambda self: message}
    passing = type(kind.__name__, (kind, ShortenTraceback), space)
    raised = passing.__new__(passing, *error.args)
    raised.args = error.args
    raised.first_useful_frame = None
    return raised  # type: ignore[no-any-return]
