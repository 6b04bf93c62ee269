"""Convert plans to the ``quantization_config`` of inference engines, and such a config to options.

vLLM and SGLang read the config of the package compressed-tensors: which layers multiply rounded operands, in how many
bits, and which elements share a scale. `to_compressed_tensors` writes the forward products of plans as such a config.
`from_compressed_tensors` reads a config as options. A config has no formats of gradients.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from fxprec.config.operands import Operands
from fxprec.config.recipes import BF16, FP8
from fxprec.errors import ConfigError, PlanError
from fxprec.plan import Gemm, Plan

Json: TypeAlias = dict[str, Any]
METHOD = "compressed-tensors"
_COMPARED = ("num_bits", "type", "strategy", "group_size", "dynamic")
_FP8 = "e4m3fn"


@dataclass(frozen=True)
class Scheme:
    """The entry of a config for one format of a product's operands."""

    preset: str
    """compressed-tensors' name of the scheme."""
    format: str
    """Format of the weights in a checkpoint."""
    formats: tuple[str, ...]
    """fxprec's formats that are exported as this scheme; the first one is used for import."""
    num_bits: int
    strategy: str
    group_size: int | None = None
    scale_dtype: str | None = None
    dynamic: bool | str = True
    """Whether scales of inputs are computed in each call; ``"local"``: only those of blocks, not the tensor's."""

    def args(self, dynamic: bool | str) -> Json:
        """Return the config's entry for weights or for inputs."""
        scale = {} if self.scale_dtype is None else {"scale_dtype": self.scale_dtype}
        said = {"num_bits": self.num_bits, "type": "float", "symmetric": True, "strategy": self.strategy}
        return said | {"group_size": self.group_size, "dynamic": dynamic} | scale

    def group(self, targets: Sequence[str]) -> Json:
        """Return a group of the config for the layers ``targets``."""
        weights, inputs = self.args(False), self.args(self.dynamic)
        return {
            "targets": list(targets),
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": self.format,
        }


SCHEMES = (
    Scheme("FP8", "float-quantized", (_FP8,), 8, "tensor"),
    Scheme("MXFP8", "mxfp8-quantized", ("e4m3fn/32:e8m0up", "mxfp8_e4m3"), 8, "group", 32, "torch.uint8"),
    Scheme("MXFP4", "mxfp4-pack-quantized", ("mxfp4",), 4, "group", 32, "torch.uint8"),
    Scheme("NVFP4", "nvfp4-pack-quantized", ("nvfp4",), 4, "tensor_group", 16, "torch.float8_e4m3fn", "local"),
)


@dataclass(frozen=True)
class Exported:
    """A config, and remarks on differences between an engine and the training."""

    config: Json
    remarks: tuple[str, ...] = ()


def to_compressed_tensors(plans: Iterable[Plan]) -> Exported:
    """Return the config for the forward products of a model's plans; layers in ``hi`` are in its ``ignore`` list.

    Raises `PlanError` for a product that no config can describe, and if no product is rounded.
    """
    plans = list(plans)
    formats: dict[str, str] = {}
    for plan in plans:
        for gemm in plan.gemms:
            _add(formats, gemm, _forward(plan, gemm))
    rounded = {name: fmt for name, fmt in formats.items() if fmt}
    if not rounded:
        names = ", ".join(sorted({repr(plan.recipe.name) for plan in plans}))
        why = next((f" ({g.module}: {g.operands_why})" for plan in plans for g in plan.gemms if g.operands_why), "")
        raise PlanError(
            f"recipe {names} rounds no operands of a forward product here{why}, so there is nothing to export; plan "
            "with 'fp8', 'mxfp8' or 'nvfp4', and layers that these can round"
        )
    by_scheme: dict[Scheme, list[str]] = {}
    for name, fmt in rounded.items():
        by_scheme.setdefault(_scheme(name, fmt), []).append(name)
    groups = {f"group_{i}": scheme.group(names) for i, (scheme, names) in enumerate(by_scheme.items())}
    config = {
        "quant_method": METHOD,
        "format": next(iter(by_scheme)).format if len(by_scheme) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [name for name, fmt in formats.items() if not fmt],
        "kv_cache_scheme": None,
    }
    return Exported(config, tuple(_remarks(plans, by_scheme)))


def _add(formats: dict[str, str], gemm: Gemm, fmt: str) -> None:
    """Add a layer's format to ``formats``. Raises `PlanError` for a product that a config cannot name."""
    if not _is_linear(gemm):
        if fmt:
            raise PlanError(
                f"{gemm.node} ({gemm.module}) is {gemm.op} in {fmt}, and a config can name linear layers only; plan "
                f"with keep_high={(gemm.module,)!r}"
            )
        if gemm.op == "fxprec.grouped_mm" and gemm.module:
            formats.setdefault(gemm.module, "")
        return
    if not gemm.module:
        if fmt:
            raise PlanError(f"{gemm.node} multiplies in {fmt} outside of every module; make it an nn.Linear")
        return
    known = formats.setdefault(gemm.module, fmt)
    if known != fmt:
        one, other = (name or "hi" for name in (known, fmt))
        raise PlanError(
            f"{gemm.module} multiplies in {one} and in {other}, and a config has one format for a layer; plan with "
            f"keep_high={(gemm.module,)!r}"
        )


def _is_linear(gemm: Gemm) -> bool:
    return gemm.op in ("aten.mm", "aten.addmm")


def _forward(plan: Plan, gemm: Gemm) -> str:
    """Return the format of a product's operands for an engine, ``""`` for ``hi``."""
    if gemm.forward or not _is_linear(gemm) or not plan.groups[gemm.group_before].low:
        return gemm.forward
    low = plan.recipe.lo_forward
    if low == plan.recipe.hi:
        return ""
    if plan.storage == "simulate":
        raise PlanError(
            f"storage 'simulate' rounds every tensor to {low.name} for every reader, which a config cannot express; "
            "plan with storage='native'"
        )
    weights = [s for s in plan.sites if s.kind == "param" and s.tensor == f"{gemm.module}.weight"]
    is_low = all(site.format == low.name or site.unread for site in weights)
    return low.name if is_low else ""


def _scheme(module: str, fmt: str) -> Scheme:
    found = next((scheme for scheme in SCHEMES if fmt in scheme.formats), None)
    if found is None:
        known = ", ".join(name for scheme in SCHEMES for name in scheme.formats)
        raise PlanError(f"{module} multiplies in {fmt}, which a config cannot name; use one of {known}")
    return found


def _remarks(plans: Sequence[Plan], schemes: Iterable[Scheme]) -> Iterator[str]:
    named = {scheme.preset for scheme in schemes}
    if "FP8" in named and not all(gemm.pays for plan in plans for gemm in plan.gemms if _is_linear(gemm)):
        yield "not every layer multiplied codes in training: an engine's products differ by e4m3fn's rounding"
    if "MXFP8" in named and any(gemm.forward.endswith("up") for plan in plans for gemm in plan.gemms):
        yield (
            "training rounded scales of blocks up, as compressed-tensors does; a config cannot say how an engine "
            "rounds them"
        )
    if "NVFP4" in named:
        yield "training took the tensor scale of inputs from each batch; an engine needs one from calibration"
        if any(plan.recipe.operands is not None and plan.recipe.operands.square_weights for plan in plans):
            yield "weights shared scales in squares of 16 x 16: a checkpoint of these numbers has each scale 16 times"


def from_compressed_tensors(config: Mapping[str, Any] | str | Path, model: nn.Module | None = None) -> Json:
    """Return options (``recipe``, ``keep_high``) whose forward products round operands as a config specifies.

    ``config`` is a ``quantization_config``, a model's ``config.json`` with one, or the path of either. ``model`` is
    needed if the config names layers by patterns, or names the layers that it rounds. Gradients are multiplied in bf16.
    Raises `ConfigError` for a config that no recipe can express.
    """
    said = _read(config)
    schemes = {_imported(name, group) for name, group in said["config_groups"].items()}
    if len(schemes) != 1:
        names = ", ".join(sorted(scheme.preset for scheme in schemes)) or "none"
        raise ConfigError(f"the config's groups have the formats {names}; a recipe has one for all forward products")
    (scheme,) = schemes
    targets = [t for name, group in said["config_groups"].items() for t in _targets(name, group)]
    ignored = _names("ignore", said.get("ignore") or [])
    _check_patterns((*targets, *ignored))
    high = _high(targets, ignored, model)
    if scheme.strategy == "tensor":
        return {"recipe": FP8, "low_ratio": 1.0, "keep_high": high}
    name = scheme.formats[0]
    recipe = replace(BF16, name=f"{scheme.preset.lower()}-forward", operands=Operands(forward=name))  # type: ignore[arg-type]
    return {"recipe": recipe, "keep_high": high}


def _read(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(config, str | Path):
        try:
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{config} cannot be read as JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise ConfigError(f"the config is {config!r}; give it a mapping")
    said = config.get("quantization_config", config)
    said = said if isinstance(said, Mapping) else {}
    if said.get("quant_method") != METHOD or not isinstance(said.get("config_groups"), Mapping):
        raise ConfigError(
            f"quant_method is {said.get('quant_method')!r}; give it a config of {METHOD!r} with config_groups"
        )
    if said.get("kv_cache_scheme"):
        raise ConfigError("the config rounds a KV cache, and a training step has none; take kv_cache_scheme out")
    return said


def _targets(name: str, group: Mapping[str, Any] | list[str]) -> list[str]:
    return _names(f"targets of group {name!r}", group if isinstance(group, list) else group.get("targets"))


def _names(what: str, value: object) -> list[str]:
    """Return names of layers. Raises `ConfigError` for anything but a list of texts."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{what} is {value!r:.60}; give it a list of names of layers")
    return value


def _check_patterns(patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            said = (
                f"the config names layers by {pattern!r}, which is not a regular expression: {error}; correct or drop "
                "it"
            )
            raise ConfigError(said) from None


def _imported(name: str, group: Mapping[str, Any] | list[str]) -> Scheme:
    """Return the scheme of a group. Raises `ConfigError` for a group that no recipe can express."""
    if isinstance(group, list):
        found = next((scheme for scheme in SCHEMES if scheme.preset == name.upper()), None)
        said: object = name
    elif not isinstance(group, Mapping):
        raise ConfigError(f"group {name!r} is {group!r:.60}; give it an object, or a list of names of layers")
    else:
        if group.get("output_activations"):
            raise ConfigError(f"group {name!r} rounds outputs, which forward products here do not; take them out")
        said = tuple(_said(group.get(key)) for key in ("weights", "input_activations"))
        found = next((s for s in SCHEMES if said == (_said(s.args(False)), _said(s.args(s.dynamic)))), None)
        if found is None:  # static scales per tensor, from calibration: the rounding is the same
            found = next((s for s in SCHEMES[:1] if said == (_said(s.args(False)),) * 2), None)
    if found is None:
        known = ", ".join(scheme.preset for scheme in SCHEMES)
        raise ConfigError(f"group {name!r} rounds weights and inputs as {said}; a recipe expresses {known}")
    return found


def _said(args: object) -> str:
    if not isinstance(args, Mapping):
        return "nothing" if args is None else f"{args!r:.60}"
    return ", ".join(f"{key} {args.get(key)}" for key in _COMPARED)


def _high(targets: Sequence[str], ignored: Sequence[str], model: nn.Module | None) -> tuple[str, ...]:
    """Return the patterns for ``keep_high``: ignored layers, and linear layers that no target names."""
    if model is None:
        odd = next((t for t in targets if t != "Linear"), None) or next(
            (i for i in ignored if i.startswith("re:")), None
        )
        if odd is not None:
            raise ConfigError(
                f"the config names layers by {odd!r}; give the model too, whose names say which layers are left"
            )
        return tuple(ignored)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return tuple(
        name
        for name, module in layers.items()
        if _matches(name, module, ignored) or not _matches(name, module, targets)
    )


def _matches(name: str, module: nn.Module, patterns: Iterable[str]) -> bool:
    """Return whether a config's pattern names a module: by name, by class, or by a regular expression after ``re:``."""
    classes = {cls.__name__ for cls in type(module).__mro__}
    return any(
        re.match(pattern[3:], name) is not None if pattern.startswith("re:") else pattern == name or pattern in classes
        for pattern in patterns
    )
