"""`Config`: all options that a user can set, validated before anything is compiled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

from fxprec.config import checks
from fxprec.config.accumulator import Accumulator, find_accumulator
from fxprec.config.checks import one_of
from fxprec.config.contradictions import check_storage, refuse_contradictions, storage_in_force
from fxprec.config.grad_scaling import NAMED, GradScaling, LossScaling, Scaling
from fxprec.config.processor import EXAMPLES, Processor
from fxprec.config.recipes import ALLOWED_RECIPES, Recipe, find_recipe
from fxprec.config.tensor_patterns import tensor_patterns
from fxprec.config.ways import BLOCK_WAYS, WAYS
from fxprec.errors import ConfigError, did_you_mean
from fxprec.numerics.formats import Format

Storage = Literal["native", "packed", "simulate"]
GroupingName = Literal["execution", "dataflow"]
Policy = Callable[[Sequence[Any], "Config"], Iterable[int]]

STORAGES = ("native", "packed", "simulate")
POLICIES = ("size", "size-ascending", "random", "uniform", "operator", "operator-io", "exact")
GEMMS = ("auto", "low", "high")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
GROUPINGS = ("execution", "dataflow")
ON_NONFINITE = ("report", "raise", "ignore")
ALLOCATORS = ("compact", "system")
LOWERINGS = ("auto", "triton", "inductor", "eager")
_WORDS = {"lowering": LOWERINGS, "gemms": GEMMS, "mode": MODES, "grouping": GROUPINGS}
_WORDS_OR_NONE = {"on_nonfinite": ON_NONFINITE, "allocator": ALLOCATORS}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of ``torch.compile(model, backend="fxprec", options={...})``.

    A config is frozen: derive another with `dataclasses.replace`. Values are stored in canonical form (bytes as
    ``int``, patterns as a tuple, paths as text). Every mistake raises `ConfigError`.
    """

    recipe: str | Recipe = "bf16"
    """Formats by role: ``"fp32"``, ``"bf16"``, ``"bf16-pure"``, ``"fp16"``, ``"fp8"``, ``"hfp8"``, ``"mxfp8"``,
    ``"nvfp4"`` or a `Recipe` (see `recipes`)."""

    storage: Storage | None = None
    """How values are stored: as ``"native"`` hardware dtypes, as ``"packed"`` integer codes of any format, or as
    ``"simulate"`` float32 carriers. None: simulate with ``accumulator`` or if torch lacks a dtype for a format of the
    recipe (as for ``hfp8``), else native."""

    policy: str | Policy = "size"
    """Which groups are low: ``"size"`` (largest first), ``"size-ascending"``, ``"random"``, ``"uniform"``,
    ``"operator"``, ``"operator-io"``, ``"exact"``, or a function ``f(tensors, config) -> group ids`` that returns all
    groups to make low. See docs/policies.md."""

    low_ratio: float | None = None
    """Lower bound on the share of elements that are low, 0 to 1. None means 1, or 0.5 in storage ``simulate``, where
    every reader gets the rounded value. Unused with ``activation_budget``, with ``plan``, and with a recipe that has no
    low format."""

    activation_budget: int | str | None = None
    """Upper bound on the bytes saved for backward, in place of ``low_ratio``, as int or ``"12GiB"``, ``"1.5GB"``. In
    storage ``simulate``: the bytes that packed storage would save."""

    peak_budget: int | str | None = None
    """Upper bound on a step's peak memory: activations, temporaries and the gradients that the step makes. Parameters,
    inputs and ``.grad`` of earlier micro-batches do not count. Bytes as int or ``"12GiB"``, or ``"60%"`` of the peak
    with everything kept in high precision."""

    ways: tuple[str, ...] | None = None
    """How values may be kept to meet a peak budget. ``"narrow"`` keeps them in the low format, ``"recompute"``
    recomputes them in backward, ``"offload"`` moves them to host memory (on a GPU). ``"int4"`` and ``"int2"`` keep
    values that tolerate zero-mean noise in that block format. None: narrow, recompute, and the recipe's block format if
    it has one. See docs/memory.md."""

    allocator: Literal["compact", "system"] | None = None
    """Allocator of CPU tensors; torch has one per process, for all models. ``"system"``: torch's own. ``"compact"``:
    tensors are placed close together, so that resident memory follows live memory. None: compact under a
    ``peak_budget``, else unchanged. See docs/memory.md."""

    cpu: str | None = None
    """Processor that models on a CPU are planned for: instruction set and 16-bit GEMMs, ``"avx2"``, ``"avx512+bf16"``.
    Plans for one processor are equal on every machine. None: this machine's processor. See docs/limits.md."""

    plan: str | os.PathLike[str] | None = None
    """A plan file to follow instead of solving; excludes ``low_ratio``, ``activation_budget`` and ``peak_budget``."""

    keep_high: tuple[str, ...] | Literal["ends"] = ()
    """Module-name patterns (`fnmatch`): tensors made by matching modules stay high. ``"ends"``: the first GEMM and the
    last group. The input that a layer saves for backward is made by the module before. Patterns without effect warn."""

    promote_above: float | None = 0.01
    """Overflow ratio, above 0 and up to 1, from which a forward tensor is promoted to high for good. From this ratio on
    a gradient's scale is lowered at once, not at its next refresh. None: no promotion, and 0.01 for scales."""

    grad_scaling: Literal["auto", "none", "fixed", "dynamic"] | Scaling = "auto"
    """How gradients are scaled into formats of a narrow range: with ``"auto"`` or a `GradScaling`, each by its own
    scale; with ``"fixed"``, ``"dynamic"`` or a `LossScaling`, all by one loss scale (for comparison); ``"none"``: not
    scaled."""

    accumulator: Accumulator | Format | str | None = None
    """Format of every GEMM's partial sums, or an `Accumulator` with more options; only in storage ``simulate``, and
    many times slower. None: the device's own accumulator, float32."""

    lowering: Literal["auto", "triton", "inductor", "eager"] = "auto"
    """How casts become code: ``"inductor"`` expands them for Inductor (on CPUs: compiled kernels), ``"triton"``
    generates kernels for NVIDIA GPUs (docs/triton.md), ``"eager"`` is the slow reference. ``"auto"``: on a GPU, for
    each half of a graph, inductor or triton, whichever is estimated to take less time; on a CPU inductor."""

    gemms: Literal["auto", "low", "high"] = "auto"
    """Which GEMMs multiply stored codes on a GPU: ``"auto"`` those that gain time by the cost model (the plan's
    ``pays``), ``"low"`` all that have a kernel, ``"high"`` none. What is stored low does not change. See
    docs/gemm.md."""

    fast_accum: bool | None = None
    """Whether fp8 tensor cores accumulate a GEMM over codes in fewer bits than float32 (``use_fast_accum`` of
    `torch._scaled_mm`), which is faster on Hopper. None: in forward, and not for gradients. See docs/gemm.md."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """Inductor's mode (CUDA graphs, autotuning); ``torch.compile(mode=...)`` also sets it."""

    dump: str | os.PathLike[str] | None = None
    """Folder for inspection dumps. None: the environment variable ``FXPREC_DUMP``, if set. See docs/inspect.md."""

    dump_tensors: tuple[str, ...] | None = None
    """Patterns ``"module:kind"`` of tensors to write into the dump folder, such as ``("layers.3.*:grad_output",)``.
    Kinds are ``output``, ``param``, ``grad_output``, ``grad_param``; without a kind, all. See docs/doctor.md."""

    dump_every: int | None = None
    """Steps from one dump of tensors to the next; the first step is dumped. None: 100."""

    dump_limit: int | str | None = None
    """Bytes of tensors that one graph writes per dumped step, as int or ``"12GiB"``. Tensors beyond the limit, or all
    with 0, are written as statistics and hashes only. None: 1 GiB."""

    watch_every: int | None = None
    """Steps from one check of rounding and attention to the next; the first step is checked. None: no checks.
    ``"biased"`` events name casts whose rounding errors have a non-zero mean, ``"logit-growth"`` events attention whose
    logits grow. A checked step takes as long as an eager step. See docs/doctor.md."""

    strict: bool = False
    """Whether a request that cannot be fulfilled is an error (`FallbackError`) instead of a warning."""

    grouping: GroupingName = "execution"
    """How operators form groups: ``"execution"`` starts a new group at each GEMM that runs, as in the paper;
    ``"dataflow"`` takes the connected regions of the graph without its GEMMs. A given plan has its own grouping. See
    docs/policies.md."""

    seed: int = 0
    """Seed of policy ``"random"``, at least 0."""

    on_nonfinite: Literal["report", "raise", "ignore"] | None = None
    """What happens before the next step begins if a tensor has an inf or a NaN. ``"report"`` warns of the first tensor,
    in execution order, that left its range; ``"raise"`` raises `NonfiniteError`; both watch every stored tensor. None
    notes an event, from the statistics of tensors in 8 bits. ``"ignore"`` does nothing. See docs/doctor.md."""

    verify: bool = False
    """Whether to compare each kernel's first output with the reference (first step slow) and drop wrong kernels."""

    def __new__(cls, *args: object, **options: object) -> Self:
        """Raise `ConfigError` for a name that is not an option, with the nearest known name."""
        _refuse_unknown(options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        put = object.__setattr__
        recipe = find_recipe(self.recipe)
        if not callable(self.policy):
            one_of("policy", self.policy, POLICIES, "or a function f(tensors, config) -> group ids")
        put(self, "low_ratio", checks.ratio("low_ratio", self.low_ratio))
        share = checks.share_hint(self.activation_budget)
        put(self, "activation_budget", checks.byte_size("activation_budget", self.activation_budget, or_else=share))
        put(self, "peak_budget", checks.byte_size_or_share("peak_budget", self.peak_budget))
        put(self, "ways", None if self.ways is None else checks.some_of("ways", self.ways, WAYS))
        put(self, "keep_high", _patterns(self.keep_high))
        put(self, "promote_above", checks.ratio("promote_above", self.promote_above, above_zero=True))
        put(self, "cpu", None if self.cpu is None else str(Processor.parse(self.cpu)))
        put(self, "plan", checks.path("plan", self.plan, "a plan file"))
        put(self, "dump", checks.path("dump", self.dump, "a folder"))
        put(self, "dump_tensors", tensor_patterns("dump_tensors", self.dump_tensors))
        for name in ("dump_every", "watch_every"):
            if getattr(self, name) is not None:
                put(self, name, checks.integer(name, getattr(self, name), least=1))
        put(self, "dump_limit", checks.byte_size("dump_limit", self.dump_limit, or_zero=True))
        put(self, "accumulator", find_accumulator(self.accumulator))
        put(self, "seed", checks.integer("seed", self.seed, least=0))
        checks.boolean("strict", self.strict)
        if self.fast_accum is not None:
            checks.boolean("fast_accum", self.fast_accum)
        checks.boolean("verify", self.verify)
        for name, allowed in _WORDS.items():
            one_of(name, getattr(self, name), allowed)
        for name, allowed in _WORDS_OR_NONE.items():
            if getattr(self, name) is not None:
                one_of(name, getattr(self, name), allowed, "or None")
        if not isinstance(self.grad_scaling, GradScaling | LossScaling):
            one_of("grad_scaling", self.grad_scaling, tuple(NAMED), "or a fxprec.GradScaling or fxprec.LossScaling")
        if self.storage is not None:
            check_storage(one_of("storage", self.storage, STORAGES), recipe)
        _refuse_blocks(self, recipe)
        refuse_contradictions(self)

    @classmethod
    def from_options(cls, options: Mapping[str, object] | None) -> Self:
        """Return the config for ``torch.compile``'s ``options``; None means no options. Raises `ConfigError`."""
        given = checks.options_of(options)
        for name in given:
            if not isinstance(name, str):
                raise ConfigError(f"option name {name!r} is not a string; the options are {', '.join(_names())}")
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data, with a recipe as its format names and a policy function as its qualified name."""
        values = {name: getattr(self, name) for name in _names()}
        if callable(self.policy):
            values["policy"] = policy_name(self.policy)
        if not isinstance(self.grad_scaling, str):
            values["grad_scaling"] = asdict(self.grad_scaling)
        if isinstance(self.accumulator, Accumulator):
            formats = {name: getattr(self.accumulator, name).name for name in ("format", "products")}
            values["accumulator"] = asdict(self.accumulator) | formats
        for name in ("ways", "dump_tensors"):
            if values[name] is not None:
                values[name] = list(values[name])
        if self.keep_high != "ends":
            values["keep_high"] = list(self.keep_high)
        return values | {"recipe": find_recipe(self.recipe).to_dict()}


def policy_name(policy: str | Policy) -> str:
    """Return a policy's name, or ``module:qualname`` of a policy function."""
    if isinstance(policy, str):
        return policy
    owner = policy if hasattr(policy, "__qualname__") else type(policy)
    return f"{owner.__module__}:{owner.__qualname__}"


def _names() -> list[str]:
    return [f.name for f in fields(Config)]


ALLOWED: Mapping[str, str] = {
    "recipe": ALLOWED_RECIPES,
    "storage": "'native', 'packed', 'simulate' or None",
    "policy": ", ".join(map(repr, POLICIES)) + " or a function f(tensors, config) -> group ids",
    "low_ratio": "a number from 0 to 1 or None",
    "activation_budget": "bytes as a positive int, or text such as '12GiB', or None",
    "peak_budget": "bytes as a positive int, text such as '12GiB' or '60%', or None",
    "ways": f"a tuple of some of {', '.join(map(repr, WAYS[:-1]))} and {WAYS[-1]!r}, or None",
    "allocator": "'compact', 'system' or None",
    "cpu": f"a string such as {EXAMPLES}, or None",
    "plan": "the path of a plan file or None",
    "keep_high": "a tuple of module-name patterns, or 'ends'",
    "promote_above": "a number above 0 and up to 1, or None",
    "grad_scaling": "'auto', 'none', 'fixed', 'dynamic', a fxprec.GradScaling or a fxprec.LossScaling",
    "accumulator": "a fxprec.Format, its name, a fxprec.Accumulator or None",
    "lowering": ", ".join(map(repr, LOWERINGS)),
    "gemms": ", ".join(map(repr, GEMMS)),
    "fast_accum": "True, False or None",
    "mode": ", ".join(map(repr, MODES)),
    "dump": "the path of a folder or None",
    "dump_tensors": "a tuple of patterns 'module:kind' such as ('layers.3.*:grad_output',), or None",
    "dump_every": "steps, as an int of at least 1, or None",
    "dump_limit": "bytes as an int, or text such as '12GiB', or None",
    "watch_every": "steps, as an int of at least 1, or None",
    "strict": "True or False",
    "grouping": ", ".join(map(repr, GROUPINGS)),
    "seed": "an int of at least 0",
    "on_nonfinite": "'report', 'raise', 'ignore' or None",
    "verify": "True or False",
}
"""The allowed values of each option, as text for error messages."""


def _refuse_unknown(options: Mapping[str, object]) -> None:
    known = _names()
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            near = next((k for k in known if repr(k) in hint), None)
            takes = f" It takes {ALLOWED[near]}. The" if near else "; the"
            raise ConfigError(
                f"unknown option {name!r}{hint}{takes} options are {', '.join(known)}; torch.compile and "
                "fxprec.Backend also take optimizer and step_budget"
            )


def _patterns(value: object) -> tuple[str, ...] | Literal["ends"]:
    if value == "ends":
        return "ends"
    if isinstance(value, str):
        raise ConfigError(f"keep_high is the string {value!r}; give it a tuple of patterns, ({value!r},), or 'ends'")
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"keep_high is {value!r}; give it {ALLOWED['keep_high']}")
    return tuple(value)


def _refuse_blocks(config: Config, recipe: Recipe) -> None:
    """Raise `ConfigError` if no tensor could be stored in the block format of the recipe or of ``ways``."""
    asked = [way for way in config.ways or () if way in BLOCK_WAYS]
    if asked and recipe.lo_forward == recipe.hi:
        raise ConfigError(
            f"ways has {asked[0]!r}, a format for copies of low tensors, and recipe {recipe.name!r} has no low "
            "tensors; use it with fp8, or leave it out"
        )
    if recipe.saved is None:
        return
    said = f"recipe.saved is {recipe.saved.name}, a format for copies of low tensors that only backward reads, and "
    if recipe.lo_forward == recipe.hi:
        raise ConfigError(f"{said}recipe {recipe.name!r} has no low tensors; use it with fp8, as 'fp8+int4'")
    if storage_in_force(config, recipe) == "simulate":
        raise ConfigError(f"{said}storage='simulate' stores no copies; use storage='native' or storage='packed'")
