"""AOTAutograd's cache: it keeps the halves of a graph together with what their driver knows of them.

A hit skips tracing, passes and partition. What is stored of a half is Inductor's key of its code and plain data; torch
pickles both beside its own entries.
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
Run = Callable[[list[Any]], Any]
Load = Callable[[Any, Run], Run]
_load: ContextVar[Load | None] = ContextVar("fxprec_load", default=None)


def _without_code(inputs: Sequence[Any]) -> Any:
    raise RuntimeError("a half that was stored runs once its code is taken from Inductor's cache")


@dataclass
class StoredHalf(OutputCode):
    """A compiled half that AOTAutograd's cache can store, if Inductor's has its code."""

    run: Run
    known: object
    """What the driver needs to run it again: dataclasses of plain data, no code."""
    guards: str | None = None
    """As Inductor stored them."""
    _boxed_call: bool = True

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run the code on a list of inputs, which it may empty."""
        return self.run(inputs)  # type: ignore[arg-type]

    def prepare_for_serialization(self) -> None:
        """Called for the copy that is stored."""
        self.run = _without_code

    def post_compile(self, example_inputs: Sequence[Any], constants: object, graph_kwargs: Any) -> None:
        """Called for what was stored: take the code from Inductor's cache. Raises torch's exceptions for a miss."""
        load = _load.get()
        if load is None or self._fx_graph_cache_key is None:
            raise autograd_cache.BypassAOTAutogradCache("an entry of fxprec's, and not its backend asks for it")
        stored = aot_autograd_result.FxGraphCacheLoadable((self._fx_graph_cache_key, []), self.guards)
        with loops_share_files():
            code = stored.post_compile(stored.load(example_inputs), graph_kwargs)
        self.run = load(self.known, code)

    def set_triton_bundle(self, triton_bundle: object) -> None:
        """Inductor's entry has it."""


def storable(run: Run, known: object, code: object) -> StoredHalf:
    """Return ``run`` as AOTAutograd's cache takes it; ``code`` is what ``compile_fx_inner`` returned."""
    half = StoredHalf(run, known, getattr(code, "guards_expr", None))
    half._fx_graph_cache_key = getattr(code, "_fx_graph_cache_key", None)  # None: not stored
    return half


@contextlib.contextmanager
def stored_autograd(load: Load | None) -> Iterator[None]:
    """Let AOTAutograd's cache answer, with what `storable` made; ``load`` says how a half found there is run.

    None: switch the cache off, since a hit would skip our passes, and with them the plan. The backward half is compiled
    with the forward half, when the entry is stored: the next of many equal layers finds it in the same step.
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
    """Say whether torch has what `StoredHalf` needs; warn where it has not."""
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
    """Return what stores a half of ours whole: AOTAutograd else stores Inductor's key alone."""

    def make_whole_entry(compiled_fw_func: Callable[..., object], *args: object, **options: object) -> Any:
        if not isinstance(inspect.unwrap(compiled_fw_func), StoredHalf):
            return make_entry(compiled_fw_func, *args, **options)
        with torch._functorch.config.patch(bundled_autograd_cache=True):
            return make_entry(compiled_fw_func, *args, **options)

    return make_whole_entry


def traced_facts(gm: GraphModule) -> Iterator[str]:
    """Yield what AOTAutograd's key leaves out of a graph and a plan may depend on.

    That is names, modules, source lines and annotations of its nodes, and the ranges and hints of its dynamic sizes.
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
