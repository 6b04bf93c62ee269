"""Find the parts of a model that fxprec compiled, and compile parts in place for trainers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from fxprec.config import Config
from fxprec.driver.backend import Backend
from fxprec.driver.named import find_backend
from fxprec.errors import ConfigError, FxprecWarning

# The attribute names that torch's wrappers add to a module's name: torch.compile, DDP, checkpoint_wrapper, FSDP1.
_WRAPPERS = frozenset({"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_NOT_IN_CONFIG = ("optimizer", "step_budget")  # options of a backend that are not in its config


def backends_in(model: object) -> dict[str, Backend]:
    """Return the backends of a model's compiled parts by module name, "" for the whole model; each backend once.

    ``model``: a result of `torch.compile`, a module that is compiled in place or has such modules inside, a wrapper of
    one (DDP, FSDP), or a `Backend`. Raises `ConfigError` if fxprec compiled no part.
    """
    if isinstance(model, Backend):
        return {"": model}
    modules = model.named_modules() if isinstance(model, nn.Module) else [("", model)]
    found: dict[str, Backend] = {}
    for name, module in modules:
        backend = find_backend(module)
        if backend is not None and all(backend is not other for other in found.values()):
            short = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
            found[name if short in found else short] = backend
    if not found:
        raise ConfigError(
            f"fxprec compiled no part of this {type(model).__name__}; call "
            'model.compile(backend="fxprec", options=...) or pass what torch.compile returned'
        )
    return found


def compile_part(part: nn.Module, layer: str | None, options: Mapping[str, object]) -> None:
    """Compile a module in place or, if ``layer`` names a class, each of its modules of that class."""
    if layer is None:
        compile_in_place(part, options)
    else:
        compile_layers(part, layer, options)


def compile_layers(model: nn.Module, layer: str | type[nn.Module], options: Mapping[str, object] | None = None) -> int:
    """Compile each module of a class in place, each with its own backend, as FSDP2 needs; return how many.

    ``layer``: the class or its name, such as ``"LlamaDecoderLayer"``. Call this before ``fully_shard``, which changes
    the classes of modules. Raises `ConfigError` if no module is of that class.
    """
    name = layer if isinstance(layer, str) else layer.__name__
    chosen = [m for m in model.modules() if any(layer in (c, c.__name__) for c in type(m).__mro__)]
    if not chosen:
        known = sorted({type(m).__name__ for m in model.modules()})
        raise ConfigError(f"no module of class {name!r} to compile; this model has {', '.join(known)}")
    for module in chosen:
        compile_in_place(module, options)
    return len(chosen)


def compile_in_place(module: nn.Module, options: Mapping[str, object] | None = None) -> None:
    """Compile a module in place, unless fxprec did already. Its class, names and `state_dict` stay the same.

    ``options`` that differ from those of the earlier compilation give a warning.
    """
    backend = find_backend(module)
    if backend is None:
        module.compile(backend="fxprec", options=dict(options or {}))
        return
    asked = {name: value for name, value in (options or {}).items() if name not in _NOT_IN_CONFIG}
    if asked and backend.config != Config.from_options(asked):
        warnings.warn(
            f"this {type(module).__name__} is compiled already, with {backend.config.recipe!r}, and {asked} is not "
            "used; compile it once, with the options you want",
            FxprecWarning,
            stacklevel=3,
        )


def checked(options: Mapping[str, object] | None) -> dict[str, Any]:
    """Return a copy of a callback's options as a dict. Raises `ConfigError` if ``options`` is not a mapping."""
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"options is {options!r}; give a dict of fxprec.Config's fields, such as {{'recipe': 'fp8'}}")
    return dict(options or {})
