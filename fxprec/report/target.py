"""Plan a model that is never allocated: call a factory and compile its model under fake tensors."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fxprec.compat import (
    FakeTensor,
    FakeTensorMode,
    cause_of,
    converting_fakes,
    quiet_fakes,
    tree_map_only,
    users_line,
)
from fxprec.errors import ConfigError, FxprecError, FxprecWarning, did_you_mean, first_line
from fxprec.report.dump_folder import DumpFolder

Factory = Callable[..., Any]
_FORM = "give path/file.py:factory or module:callable"


def find_factory(target: str) -> Factory:
    """Return the callable that ``path/file.py:factory`` or ``module:callable`` names. Raises `ConfigError`."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ConfigError(f"target {target!r} names no factory; {_FORM}")
    try:
        module = _import(place)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"target {target!r}: cannot import {place}: {line_of(error)}; {_FORM}") from error
    found: Factory | None = getattr(module, name, None)
    if not callable(found):
        near = did_you_mean(name, [n for n, v in vars(module).items() if callable(v)])
        raise ConfigError(f"target {target!r}: {place} has no callable {name!r}{near}; {_FORM}")
    return found


def called(function: Factory, target: str, *args: object) -> Any:
    """Call the function that a target names.

    Raises `ConfigError`, with the user's line, for an exception of the user's code. An exception of fxprec's own code,
    or of torch while it compiles for fxprec, is not changed.
    """
    try:
        return function(*args)
    except FxprecError:
        raise
    except Exception as error:
        place = _users_line(error, function)
        if place is None:
            raise
        said = line_of(error)
        where = "" if place in said else f"{place}: "
        raise ConfigError(
            f"target {target!r}: {where}{said}; call it in a script of yours to see the traceback"
        ) from error


def model_and_batch(result: object, target: str) -> tuple[Any, Any, Any]:
    """Return the model, the batch and the loss, or None for it, that a target returned. Raises `ConfigError`."""
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        raise ConfigError(
            f"target {target!r} returned {type(result).__name__}; let it return (model, batch) or (model, batch, loss)"
        )
    return result[0], result[1], result[2] if len(result) == 3 else None


def _users_line(error: Exception, function: Factory) -> str | None:
    """Return ``"model.py:12"``, the line of the user's file that raised; None if fxprec's code raised after it."""
    code = getattr(function, "__code__", None)
    if code is None:
        return getattr(function, "__qualname__", type(function).__name__)
    own, line = str(Path(__file__).parents[1]), code.co_firstlineno  # if arguments do not fit, none of its lines ran
    for frame in traceback.extract_tb(error.__traceback__)[1:]:
        if frame.filename == code.co_filename:
            line = frame.lineno or line
        elif frame.filename.startswith(own):
            return None
    return f"{Path(code.co_filename).name}:{line}"


def _import(place: str) -> Any:
    if not place.endswith(".py"):
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    path = Path(place).resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as Python does for a script, so that it can import its neighbours
    name = f"_fxprec_target_{path.stem}"  # a name of its own: other modules of this process called module.py stay
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("no module can be loaded from it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def plan_under_fakes(factory: Factory, backend: Callable[..., Any], target: str, folder: DumpFolder) -> None:
    """Build ``(model, example inputs)`` and compile until ``folder`` has a plan; its ``told`` are fxprec's warnings.

    Raises `FxprecError`.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, _told_to(folder), _uncollected(), quiet_fakes():
        try:
            with converting_fakes():
                model, args, keywords = _made(factory(), target)
            args, keywords = tree_map_only(torch.Tensor, lambda t: _fake(mode, t), (args, keywords))
            torch.compile(model, backend=backend)(*args, **keywords)  # type: ignore[no-untyped-call]
        except Exception as error:
            if folder.has_plans:
                return  # planned; later errors, such as those of running on fake tensors, do not matter
            if isinstance(error, FxprecError):
                raise
            raise ConfigError(
                f"target {target!r}: cannot be planned under fake tensors: {line_of(error)}; make it run as "
                "model(*inputs) without reading values"
            ) from error


@contextmanager
def _told_to(folder: DumpFolder) -> Iterator[None]:
    """Keep fxprec's warnings; ignore those of the user's code and of torch's tracing, which are not of a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", FxprecWarning)
        try:
            yield
        finally:
            folder.told = tuple(dict.fromkeys(str(warning.message) for warning in caught))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch the garbage collector off, since the objects of tracing live until the end anyway.

    With it, planning Llama 7B took 41 s of CPU; without it, 36 s and 45 MB more memory.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _made(result: object, target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if not isinstance(result, tuple | list) or len(result) != 2 or not callable(result[0]):
        raise ConfigError(
            f"target {target!r} returned {type(result).__name__}; let it return (model, example inputs), the inputs "
            "a tensor, a tuple or a dict of keywords"
        )
    model, inputs = result
    if isinstance(inputs, Mapping):
        return model, (), dict(inputs)
    return model, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)


def line_of(error: BaseException) -> str:
    """Return an error in one line, with the user's line that raised; Dynamo's errors are replaced by their causes."""
    said, place = first_line(cause_of(error)), users_line(error)
    return f"{said} ({place})" if place else said
