"""Refuse options that contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxprec.config.recipes import Recipe, find_recipe
from fxprec.errors import ConfigError

if TYPE_CHECKING:
    from fxprec.config.config import Config, Storage


def without_dtype(recipe: Recipe) -> list[str]:
    """Return the names of a recipe's formats that torch has no dtype for."""
    return [fmt.name for fmt in recipe.formats if fmt.torch_dtype is None]


def storage_in_force(config: Config, recipe: Recipe) -> Storage:
    """Return the given storage; without one, simulate where the options can only be simulated, else native."""
    return config.storage or ("simulate" if config.accumulator is not None or without_dtype(recipe) else "native")


def check_storage(storage: str, recipe: Recipe) -> None:
    """Raise `ConfigError` if the storage is native and torch has no dtype for a format of the recipe."""
    missing = without_dtype(recipe)
    if storage == "native" and missing:
        raise ConfigError(
            f"storage='native' cannot hold recipe {recipe.name!r}: torch has no dtype for {', '.join(missing)}; "
            "use storage='packed' (integer codes) or storage='simulate' (float32 carriers)"
        )


def refuse_contradictions(config: Config) -> None:
    """Raise `ConfigError` if an option makes another option useless or contradicts it."""
    if config.mode != "default" and config.lowering == "eager":
        raise ConfigError(
            f"mode={config.mode!r} tunes Inductor, which lowering='eager' does not run; leave one of them out"
        )
    if config.accumulator is not None and config.storage not in (None, "simulate"):
        raise ConfigError(
            f"accumulator simulates sums that no hardware computes, and storage={config.storage!r} runs GEMMs on the "
            "hardware's own accumulators; use storage='simulate' or leave accumulator out"
        )
    for name in ("dump_every", "dump_limit"):
        if getattr(config, name) is not None and config.dump_tensors is None:
            raise ConfigError(
                f"{name} is about the tensors that dump_tensors names, and none is named; give dump_tensors=('*',) for "
                f"all of them, or leave {name} out"
            )
    if config.seed and config.plan is None and config.policy != "random" and not callable(config.policy):
        raise ConfigError(
            f"seed={config.seed} shuffles the groups of policy='random', and policy is {config.policy!r}; give "
            "policy='random' too, or leave seed out"
        )
    if config.peak_budget is not None:
        _refuse_with_budget(config, "peak_budget")
    goals = ("low_ratio", "activation_budget", "plan")
    given = [name for name in goals if getattr(config, name) is not None]
    if len(given) > 1:
        raise ConfigError(
            f"{' and '.join(given)} are both given, and each decides how much is low; keep one of them, drop the other"
        )


def refuse_beside_step_budget(config: Config, step_budget: int | None) -> None:
    """Raise `ConfigError` for an option that contradicts the step budget, and for ``ways`` to meet no budget."""
    if step_budget is not None:
        _refuse_with_budget(config, "step_budget")
    elif config.ways is not None and config.peak_budget is None:
        raise ConfigError(
            "ways says how a peak budget is met, and no peak_budget is given; give peak_budget or step_budget too, or "
            "leave ways out"
        )


def _refuse_with_budget(config: Config, budget: str) -> None:
    """Raise `ConfigError` for an option that contradicts ``budget``, the name of the option that bounds the peak."""
    for name, why in (
        ("activation_budget", f"bounds what is saved for backward, which {budget} does too"),
        ("plan", f"says how each value is kept, which {budget} decides too"),
    ):
        if getattr(config, name) is not None:
            raise ConfigError(f"{budget} and {name} are both given, and {name} {why}; keep one of them, drop the other")
    if "offload" in (config.ways or ()) and config.mode in ("reduce-overhead", "max-autotune"):
        raise ConfigError(
            f"ways has 'offload', and mode={config.mode!r} records CUDA graphs, which cannot contain copies to host "
            "memory; choose mode='default' or 'max-autotune-no-cudagraphs', or leave 'offload' out"
        )
    if storage_in_force(config, find_recipe(config.recipe)) == "simulate":
        which, way = _why_simulated(config)
        raise ConfigError(
            f"{budget} bounds what a step holds when operators read unrounded values, and storage='simulate'{which} "
            f"gives them rounded ones; {way}, or leave {budget} out"
        )


def _why_simulated(config: Config) -> tuple[str, str]:
    """Return why a config is simulated, as a relative clause, and what to do instead."""
    missing = without_dtype(find_recipe(config.recipe))
    if config.accumulator is not None:
        return ", which accumulator needs,", "leave accumulator out"
    if config.storage is None:
        return f", the default where torch has no dtype for {', '.join(missing)},", "give storage='packed'"
    return "", "choose storage='packed'" if missing else "leave storage out"
