"""Watch the frames that Dynamo compiles too often, compiles in pieces, or leaves uncompiled."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo import convert_frame, external_utils
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import DelayGraphBreakVariable, NullVariable
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch.nn import Module

from fxprec.compat.backends import innermost_backend
from fxprec.compat.patches import replaced, tell_of_missing

if TYPE_CHECKING:
    from torch._C._dynamo.eval_frame import _PyInterpreterFrame as Frame
    from torch._dynamo.cache_size import CacheSizeRelevantForFrame
    from torch._dynamo.convert_frame import ConvertFrame, ConvertFrameAssert
    from torch._dynamo.output_graph import GraphCompileReason
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase as Translator
    from torch._dynamo.types import ConvertFrameReturn as Converted
    from torch._guards import CompileId


@dataclass
class Compilations:
    """The number of Dynamo's compilations for one model."""

    by_frame: Counter[int | None] = field(default_factory=Counter)
    """Number of compilations by Dynamo's frame id."""
    at_limit: dict[CodeType, tuple[int, int]] = field(default_factory=dict)
    """Functions that hit a recompile limit for this model, with Dynamo's limits at that time."""


@contextmanager
def recompiles_per_model(
    compilations_of: Callable[[object], Compilations | None], hit: Callable[[object, str, str], None]
) -> Iterator[None]:
    """Apply Dynamo's recompile limits to each model by itself, and call ``hit(backend, code, limit)`` at a limit.

    Dynamo counts the compilations of a code object for all models together. This suits backends that compare equal,
    whose models share code. fxprec's backends do not compare equal, so the ninth block of a network would run
    uncompiled. At a limit Dynamo compiles the code for no model any more, not even for new ones. ``compilations_of``
    returns a backend's own counts, or None for other backends, which keep Dynamo's count.
    """
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    def exceeds_for_this_model(cache_size: CacheSizeRelevantForFrame, compile_id: CompileId) -> tuple[bool, str]:
        caller = sys._getframe(1).f_locals
        code, function = caller.get("code"), caller.get("compiler_fn")
        if not isinstance(code, CodeType) or function is None:
            tell_of_missing("'code' and 'compiler_fn' of Dynamo's _compile", LIMITS_LOST)
            return exceeds(cache_size, compile_id)
        backend = innermost_backend(function)
        known = compilations_of(backend)
        if known is None:
            return exceeds(cache_size, compile_id)
        own = sum(e.backend is backend or e.backend == backend for e in _debug_get_cache_entry_list(code))
        sizes = {f.name: min(own, getattr(cache_size, f.name)) for f in fields(cache_size)}
        id_ = replace(compile_id, frame_compile_id=known.by_frame[compile_id.frame_id])
        known.by_frame[compile_id.frame_id] += 1
        exceeded, limit = exceeds(replace(cache_size, **sizes), id_)
        if exceeded:
            hit(backend, named(code), f"{limit} ({getattr(torch._dynamo.config, limit)})")
            known.at_limit[code] = _limits()
        return exceeded, limit

    def for_this_model(convert: Callable[..., Converted]) -> Callable[..., Converted]:
        def convert_frame_of(self: ConvertFrame, frame: Frame, *args: object, **options: object) -> Converted:
            known = compilations_of(innermost_backend(self._torchdynamo_orig_backend))
            at_limit = {} if known is None else known.at_limit
            if at_limit.get(frame.f_code) == _limits():
                return RUN_ONLY
            result = convert(self, frame, *args, **options)
            return RUN_ONLY if at_limit.get(frame.f_code) == _limits() else result

        return convert_frame_of

    exceeds: Callable[..., tuple[bool, str]] = _dynamo.exceeds_recompile_limit
    with (
        replaced(_dynamo, "exceeds_recompile_limit", lambda _: exceeds_for_this_model),
        replaced(convert_frame.ConvertFrame, "__call__", for_this_model),
    ):
        yield


def _limits() -> tuple[int, int]:
    return torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit


_dynamo: Any = convert_frame
_ALONE = _dynamo.FrameExecStrategy(_dynamo.FrameAction.RUN_ONLY, _dynamo.FrameAction.RUN_ONLY)
RUN_ONLY: Converted = _dynamo.ConvertFrameReturn(_ALONE, apply_to_code=False)
"""A result that makes Dynamo run this call with code compiled earlier, or uncompiled."""


@contextmanager
def frames_left_uncompiled(tell: Callable[[object, str, object, str], None]) -> Iterator[None]:
    """Call ``tell(backend, code, owner, reason)`` for a frame that Dynamo gives up and runs uncompiled.

    ``owner`` is the frame's first argument, usually the module of a method. Dynamo reports such a frame only in its
    log, and no backend sees the frame's own computation. `recompiles_per_model` reports recompile limits.
    """
    convert: Callable[..., Converted] = convert_frame.ConvertFrameAssert.__call__

    def convert_and_watch(self: ConvertFrameAssert, frame: Frame, *args: object, **options: object) -> Converted:
        try:
            return convert(self, frame, *args, **options)
        except (Unsupported, UserError) as error:
            reason = _reason_of(error)
            if self._one_graph:  # the user set fullgraph=True, so the error ends the call
                raise
            if _is_expected(frame) and _LIMIT not in reason:
                tell(innermost_backend(self._torchdynamo_orig_backend), _name_of(frame), owner_of(frame), reason)
            raise

    with replaced(convert_frame.ConvertFrameAssert, "__call__", lambda _: convert_and_watch):
        yield


def _name_of(frame: Frame) -> str:
    """Return the name and line of a frame's code; the class of a module that only a wrapper of torch's calls."""
    if frame.f_code.co_filename != external_utils.__file__:
        return named(frame.f_code)
    wrapped = frame.f_locals.get("fn")
    owner = getattr(wrapped, "__self__", wrapped)
    return type(owner).__name__ if isinstance(owner, Module) else named(frame.f_code)


@dataclass(frozen=True)
class Called:
    """The modules that the statement at a graph break calls; the statement runs uncompiled."""

    modules: tuple[Module, ...]
    """The called module, or the modules passed to one of torch's functions that calls them."""
    with_all_inside: bool
    """Whether Dynamo also compiles no frame inside the call, as inside `torch.utils.checkpoint.checkpoint`."""


@contextmanager
def graph_breaks(tell: Callable[[object, str, object, str, Called], None]) -> Iterator[None]:
    """Call ``tell(backend, code, owner, reason, called)`` for each graph break of a frame that Dynamo compiles.

    ``owner`` is the frame's first argument. At a recurrent module of torch the reason is `LEAVES_RECURRENT` (torch
    2.15; older versions give up the frame).
    """
    convert: Callable[..., Converted] = convert_frame.ConvertFrameAssert.__call__
    found: list[dict[str, Called]] = []  # for each frame being compiled (they can nest): breaks by reason

    def convert_and_watch(self: ConvertFrameAssert, frame: Frame, *args: object, **options: object) -> Converted:
        found.append({})
        try:
            result = convert(self, frame, *args, **options)
        finally:
            breaks = found.pop()
        for reason, called in breaks.items():
            is_wrapper = frame.f_code.co_filename == external_utils.__file__  # around a module with torch's own forward
            name = type(called.modules[0]).__name__ if is_wrapper and called.modules else named(frame.f_code)
            tell(innermost_backend(self._torchdynamo_orig_backend), name, owner_of(frame), reason, called)
        return result

    def compile_and_watch(compile_subgraph: Callable[..., object]) -> Callable[..., object]:
        def compile_piece(
            self: OutputGraph, translator: Translator, reason: GraphCompileReason, *args: object, **options: object
        ) -> object:
            if found and reason.graph_break:
                found[-1].setdefault(_heading(reason.reason), _called(translator))
            return compile_subgraph(self, translator, reason, *args, **options)

        return compile_piece

    with (
        replaced(convert_frame.ConvertFrameAssert, "__call__", lambda _: convert_and_watch),
        replaced(OutputGraph, "compile_subgraph", compile_and_watch),
    ):
        yield


def _heading(reason: str) -> str:
    return LEAVES_RECURRENT if LEAVES_RECURRENT in reason else reason.strip().partition("\n")[0]


def _called(translator: Translator) -> Called:
    """Return what the call on Dynamo's stack calls: a null, function and arguments; in Python 3.13 null is second."""
    stack = translator.stack
    nulls = [i for i, entry in enumerate(stack) if isinstance(entry, NullVariable)]
    values = (
        [_value(entry, translator) for entry in stack[nulls[-1] - (sys.version_info >= (3, 13)) :]] if nulls else []
    )
    modules = tuple(value for value in values if isinstance(value, Module))
    return Called(modules, any(isinstance(value, TagActivationCheckpoint) for value in values))


def _value(entry: VariableTracker, translator: Translator) -> object:
    """Return the value of an entry of Dynamo's stack without adding guards; for a method, return its owner."""
    if isinstance(entry, LazyVariableTracker):
        return _value(entry.unwrap(), translator) if entry.is_realized() else entry.peek_value()
    if isinstance(entry, DelayGraphBreakVariable) and entry.source is not None:  # a recurrent module, in torch 2.15
        return entry.source.get_value({"G": translator.f_globals, "L": translator.f_locals}, {}, {})
    held = vars(entry)
    owner = held.get("im_self", held.get("obj"))  # torch 2.15 or older
    return _value(owner, translator) if isinstance(owner, VariableTracker) else held.get("value")


LIMITS_LOST = "Dynamo's recompile limits count what all models compile of one function, not each model alone"
LEAVES_RECURRENT = "Dynamo does not support RNN, GRU, or LSTM"
_LIMIT = "recompile limit exceeded"
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _reason_of(error: Exception) -> str:
    """Return the headings of Dynamo's long message: the first break, and the reason for giving up the frame."""
    lines = [line.strip() for line in str(error).splitlines() if line[:1].strip()]
    headings = [
        line for line in lines if not line.startswith(("***", "Failed to handle", "from user code", "Set TORCH"))
    ]
    reason = ", then ".join(dict.fromkeys(headings[:2])) or type(error).__name__
    if reason.startswith("Backend compiler exception"):  # the exception's own message is on a later line
        words = (line.strip().partition("Exception:")[2] for line in str(error).splitlines())
        reason += f": {next(filter(None, words), 'of unknown cause')}"
    raised = (line.partition("context: raised exception ")[2] for line in str(error).splitlines())
    if found := next(filter(None, raised), ""):  # the model's own exception
        reason += f" {found}"
    hint = next(
        (line.partition("Hint: ")[2] for line in str(error).splitlines() if "Hint: Set torch._dynamo" in line), ""
    )
    return f"{reason} ({hint})" if hint else reason


def _is_expected(frame: Frame) -> bool:
    """Return whether a user expects a frame to be compiled: of generators, which never are, only a ``forward``."""
    if not frame.f_code.co_flags & _GENERATORS:
        return True
    owner = owner_of(frame)
    return isinstance(owner, Module) and getattr(owner.forward, "__code__", None) is frame.f_code


def owner_of(frame: Frame) -> object:
    """Return a frame's first argument, usually the module of a method."""
    return frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))


def named(code: CodeType) -> str:
    """Return a function's name with its file and line."""
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
