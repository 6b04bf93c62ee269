"""Warn, through a model's backend, of code that Dynamo leaves uncompiled, and note graph breaks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.nn import Embedding, Module, ModuleDict, ModuleList, Sequential

from fxprec import compat
from fxprec.driver.event_log import EventLog
from fxprec.errors import FxprecError

if TYPE_CHECKING:
    from fxprec.compat.frames import Called
    from fxprec.driver.backend import Backend


@dataclass(frozen=True)
class Frames:
    """The log for uncompiled frames and graph breaks of one model, and its count of compilations."""

    log: EventLog
    step: Callable[[], int]
    compilations: compat.Compilations = field(default_factory=compat.Compilations)
    left: dict[str, tuple[str, str]] = field(default_factory=dict)
    """For each code that runs uncompiled, or leaves modules uncompiled: which of the two, and why."""

    def tell(self, code: str, what: str, why: str, *, is_for_good: bool = True) -> None:
        """Warn that ``code`` does ``what``, for instance runs uncompiled. Raises `FallbackError` under ``strict``."""
        if is_for_good:
            self.left.setdefault(code, (what, why))
        try:
            self.log.tell(code, f"{what}, {why}", step=self.step())
        except FxprecError as error:
            raise compat.through_dynamo(error) from error


class Watched:
    """Base of the backends that ``torch.compile`` gets: a `Backend`, or a name with one `Backend` per wrapper."""

    def backend_of(self, wrapper: object) -> Backend:
        """Return the backend that a ``torch.compile`` wrapper calls. Raises `ConfigError` for wrong options."""
        raise NotImplementedError


def called_by(wrapper: object) -> Backend | None:
    """Return the backend that a ``torch.compile`` wrapper calls, or None if it is not one of fxprec's."""
    function = getattr(wrapper, "compiler_fn", wrapper)
    return function.backend_of(wrapper) if isinstance(function, Watched) else None


class Watch:
    """Patches of Dynamo's functions that report uncompiled code, in force while one of fxprec's backends lives."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a backend may be freed while another is constructed
        self._patches, self._watched = ExitStack(), 0
        self._is_on = False

    def begin(self) -> None:
        """Install the patches, until the last backend passed to `keep` is freed."""
        with self._lock:
            if not self._is_on:
                self._is_on = True
                _replace(self._patches)

    def keep(self, backend: object) -> None:
        """Keep the patches installed while ``backend`` lives."""
        with self._lock:
            self._watched += 1
            weakref.finalize(backend, self._drop).atexit = False
            self.begin()

    def _drop(self) -> None:
        with self._lock:
            self._watched -= 1
            if not self._watched and self._is_on:
                self._is_on = False
                self._patches.close()
                compat.forget_name("fxprec")  # torch looks the name up again at its next use, which calls `begin`


WATCH = Watch()


def _replace(patches: ExitStack) -> None:
    def known(wrapper: object) -> Frames | None:
        try:
            backend = called_by(wrapper)
        except FxprecError:  # the compilation of a graph raises it
            return None
        return None if backend is None else backend.frames

    def compilations(wrapper: object) -> compat.Compilations | None:
        frames = known(wrapper)
        return None if frames is None else frames.compilations

    def tell(wrapper: object, code: str, what: str, why: str) -> None:
        try:
            backend = called_by(wrapper)
        except FxprecError as error:
            raise compat.through_dynamo(error) from error
        if backend is not None:
            backend.frames.tell(code, what, why)

    def tell_of_frame(wrapper: object, code: str, owner: object, reason: str) -> None:
        if isinstance(owner, Module) and not _is_made(owner):
            return  # the constructor of a module that forward creates; it computes nothing of the step
        tell(wrapper, code, _RUNS, f"in the model's own precision{_left_out(owner)}: {reason}. {_mend(owner)}")

    def note_break(wrapper: object, code: str, owner: object, reason: str, called: Called) -> None:
        if left := _left_behind(owner, called):
            mend = _ALLOW if reason == compat.LEAVES_RECURRENT else _BREAK
            why = f"in the model's own precision: {reason.rstrip('.')}. {mend}"
            tell(wrapper, code, f"leaves {left} uncompiled", why)
        elif (frames := known(wrapper)) is not None:
            detail = f"split into several graphs, each planned separately: {reason}"
            frames.log.note("uncompiled", code, detail, step=frames.step())

    def tell_of_limit(wrapper: object, code: str, limit: str) -> None:
        tell(wrapper, code, _RUNS, _LIMIT.format(limit))

    def tell_of_mode(wrapper: object, code: str, mode: str) -> bool:
        frames = known(wrapper)
        if frames is not None:
            frames.tell(code, f"{_RUNS} in this call", _MODE.format(mode), is_for_good=False)
        return frames is not None

    patches.enter_context(compat.recompiles_per_model(compilations, tell_of_limit))
    patches.enter_context(compat.frames_left_uncompiled(tell_of_frame))
    patches.enter_context(compat.graph_breaks(note_break))
    patches.enter_context(compat.suppressed_errors(tell_of_frame))
    patches.enter_context(compat.calls_inside_modes(tell_of_mode))
    patches.enter_context(compat.torchs_modules_in_place(lambda wrapper: known(wrapper) is not None))


_RUNS = "runs uncompiled"
_LIMIT = (
    "in the model's own precision, where no compiled code fits: this model hit "
    "torch._dynamo.config.{}, and Dynamo compiles this code no further for it; see "
    'TORCH_LOGS="recompiles" for what changes from call to call, make it a tensor, or raise the limit'
)
_MODE = (
    "in the model's own precision: Dynamo compiles nothing inside of a torch dispatch "
    "mode, here {}; calls outside of it are compiled"
)
_ALLOW = "Set torch._dynamo.config.allow_rnn=True to compile it"
_BREAK = (
    "Dynamo compiles the code of torch's modules only as part of a caller; "
    'TORCH_LOGS="graph_breaks" shows where it stopped'
)
_MEND = (
    "Only functions and modules of yours that it calls are compiled, each by itself{}; "
    'TORCH_LOGS="graph_breaks" shows where Dynamo stopped: take that out of the loop, or compile the parts'
)


def _left_out(owner: object) -> str:
    """Name torch's own modules that an uncompiled method calls: Dynamo does not compile frames of torch's code."""
    theirs = [found for name, child in _children(owner) for found in _torchs_own(child, name)]
    return f", with {', '.join(theirs)}" if theirs else ""


def _mend(owner: object) -> str:
    """Name the user's modules that an uncompiled method calls, which Dynamo compiles."""
    ours = [found for name, child in _children(owner) for found in _users_own(child, name)]
    more = f" and {len(ours) - 3} more" if len(ours) > 3 else ""
    return _MEND.format(f" ({', '.join(ours[:3]) or 'here no module'}{more})" if isinstance(owner, Module) else "")


def _children(owner: object) -> list[tuple[str, Module]]:
    return [*owner.named_children()] if isinstance(owner, Module) else []


def _left_behind(owner: object, called: Called) -> str:
    """Name the modules that a graph break leaves uncompiled; empty if all called code is compiled by itself."""
    named = owner.named_modules() if isinstance(owner, Module) and _is_made(owner) else ()
    names = {module: name for name, module in named}
    if called.with_all_inside:
        inside = [names.get(module, type(module).__name__) for module in called.modules]
        return f"the checkpointed {', '.join(inside) or 'region'}"
    return ", ".join(found for module in called.modules for found in _torchs_own(module, names.get(module, "")))


def _is_made(module: Module) -> bool:
    """Return whether ``Module.__init__`` has run: before that, a module has no dictionary of children."""
    return "_modules" in vars(module)


def _torchs_own(module: Module, name: str) -> Iterator[str]:
    """Yield the names of modules with parameters that run torch's own code, down to where the user's code begins."""
    if not _runs_torchs_code(module):
        return
    if isinstance(module, Sequential | ModuleList | ModuleDict):
        for key, child in module.named_children():
            yield from _torchs_own(child, f"{name}.{key}" if name else key)
    elif not isinstance(module, Embedding) and any(True for _ in module.parameters()):  # embeddings save only indices
        yield name or type(module).__name__


def _users_own(module: Module, name: str) -> Iterator[str]:
    """Yield the names of the outermost modules of the user's code that Dynamo compiles if they are called."""
    if isinstance(module, Sequential | ModuleList | ModuleDict) and _runs_torchs_code(module):
        for key, child in module.named_children():
            yield from _users_own(child, f"{name}.{key}")
    elif not _runs_torchs_code(module) and not _is_left_alone(module):
        yield name


def _is_left_alone(module: Module) -> bool:
    return bool(getattr(module.forward, "_torchdynamo_disable", False))


def _runs_torchs_code(module: Module) -> bool:
    """Return whether ``forward`` is torch's own code, and is not disabled by `torch.compiler.disable`."""
    code = getattr(module.forward, "__module__", "")
    return not _is_left_alone(module) and code.startswith("torch.nn.modules.")  # not DDP's
