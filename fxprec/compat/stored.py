"""Store the halves of a graph in AOTAutograd's cache, together with the driver's facts about the halves.

A hit skips tracing, passes and partition. The entry of a half has the key of its code in Inductor's cache, and plain
data; torch pickles both beside its own entries.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch._functorch.config
from torch._functorch._aot_autograd import aot_autograd_result, autograd_cache
from torch._inductor.output_code import OutputCode
from torch.fx import GraphModule

from fxprec.compat.autograd import backward_at_once
from fxprec.compat.patches import optional, replaced, tell_of_missing

loops_share_files = optional("fxprec.compat.units", "loops_share_files", "C++ loops compile one to a file, slower")
constant_places_are_arguments = optional(
    "fxprec.compat.places", "constant_places_are_arguments", "equal layers compile Triton kernels of their own, slower"
)
Run = Callable[[list[Any]], Any]
Load = Callable[[Any, Run], Run]
_load: ContextVar[Load | None] = ContextVar("fxprec_load", default=None)


def _without_code(inputs: Sequence[object]) -> object:
    raise RuntimeError("a half that was stored runs once its code is taken from Inductor's cache")


@dataclass
class StoredHalf(OutputCode):
    """A compiled half that AOTAutograd's cache can store, if Inductor's has its code."""

    run: Run
    known: object
    """The facts that the driver needs to run the half: dataclasses of plain data, no code."""
    guards: str | None = None
    """The guard expression of Inductor's code."""
    _boxed_call: bool = True

    def __call__(self, inputs: Sequence[object]) -> object:
        """Run the code on a list of inputs, which the code may empty."""
        return self.run(inputs)  # type: ignore[arg-type]

    def prepare_for_serialization(self) -> None:
        """Remove the code; AOTAutograd calls this on the copy that it stores."""
        self.run = _without_code

    def post_compile(self, example_inputs: Sequence[object], constants: object, graph_kwargs: Any) -> None:
        """Load the code of a stored half from Inductor's cache. Raises torch's exceptions for a miss."""
        load = _load.get()
        if load is None or self._fx_graph_cache_key is None:
            raise autograd_cache.BypassAOTAutogradCache("an entry of fxprec's, and not its backend asks for it")
        stored = aot_autograd_result.FxGraphCacheLoadable((self._fx_graph_cache_key, []), self.guards)
        with loops_share_files():
            code = stored.post_compile(stored.load(example_inputs), graph_kwargs)
        self.run = load(self.known, code)

    def set_triton_bundle(self, triton_bundle: object) -> None:
        """Do nothing: Inductor's own entry has the bundle."""


def storable(run: Run, known: object, code: object) -> StoredHalf:
    """Wrap ``run`` as a half that AOTAutograd's cache can store. ``code``: the result of ``compile_fx_inner``."""
    half = StoredHalf(run, known, getattr(code, "guards_expr", None))
    half._fx_graph_cache_key = getattr(code, "_fx_graph_cache_key", None)  # None: the code is not in the cache
    return half


@contextlib.contextmanager
def stored_autograd(load: Load | None) -> Iterator[None]:
    """Use AOTAutograd's cache for halves of `storable`; ``load`` returns the callable of a half that was found.

    ``load`` None switches the cache off, since a hit would skip fxprec's passes and so the plan. The backward half is
    compiled together with the forward half, so that the entry is stored before the next equal layer is compiled.
    """
    if load is None or not _can_store():
        with torch._functorch.config.patch(enable_autograd_cache=False):
            yield
        return
    token = _load.set(load)
    try:
        with backward_at_once(), replaced(autograd_cache.AOTAutogradCache, "make_entry", _storing_whole_halves):
            yield
    finally:
        _load.reset(token)


def _can_store() -> bool:
    """Return whether torch has the private names that `StoredHalf` needs; warn if one is missing."""
    lost = "no compiled graph is stored, and each process compiles anew"
    for owner, name in (
        (getattr(autograd_cache, "AOTAutogradCache", autograd_cache), "make_entry"),
        (autograd_cache, "BypassAOTAutogradCache"),
        (aot_autograd_result, "FxGraphCacheLoadable"),
        (torch._functorch.config, "bundled_autograd_cache"),
    ):
        if not hasattr(owner, name):
            tell_of_missing(f"{name} of {owner.__name__}", lost)
            return False
    return True


def _storing_whole_halves(make_entry: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``make_entry`` to store a `StoredHalf` whole, of which AOTAutograd would store only Inductor's key."""

    def make_whole_entry(compiled_fw_func: Callable[..., object], *args: object, **options: object) -> object:
        if not isinstance(inspect.unwrap(compiled_fw_func), StoredHalf):
            return make_entry(compiled_fw_func, *args, **options)
        with torch._functorch.config.patch(bundled_autograd_cache=True):
            return make_entry(compiled_fw_func, *args, **options)

    return make_whole_entry


def traced_facts(gm: GraphModule) -> Iterator[str]:
    """Yield facts of a graph that a plan may depend on and that AOTAutograd's key leaves out.

    These are names, modules, source lines and annotations of nodes, and ranges and hints of dynamic sizes.
    """
    for part in gm.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            modules = [(path, kind) for path, kind in (node.meta.get("nn_module_stack") or {}).values()]
            facts = (node.name, modules, node.meta.get("stack_trace"), node.meta.get("custom"))
            yield repr((*facts, *_sizes(node.meta.get("example_value"))))


def _sizes(value: object) -> Iterator[tuple[str, str, str]]:
    for size in value.shape if isinstance(value, torch.Tensor) else (value,):
        if isinstance(size, torch.SymInt | torch.SymFloat):
            node = size.node
            assert node.shape_env is not None, "a symbol belongs to what made it"
            yield str(node.expr), str(node.hint), str(node.shape_env.var_to_range.get(node.expr))
