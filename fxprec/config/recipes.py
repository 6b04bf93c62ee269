"""Recipes: the formats that a training step uses, by role (docs/algorithms.md, "Demotion and promotion")."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from fxprec.config import checks
from fxprec.config.operands import Operands, find_operands
from fxprec.errors import ConfigError, did_you_mean
from fxprec.numerics import blocks
from fxprec.numerics.blocks import BlockFormat, find_blocks
from fxprec.numerics.formats import Format, parse


@dataclass(frozen=True, kw_only=True)
class Recipe(checks.Options):
    """Formats by role. Every format field takes a `Format` or its name.

    Raises `ConfigError` for an unknown format, and for a low format wider than ``hi``.
    """

    hi: Format
    """Format of every tensor that is not low."""
    lo_forward: Format
    """Format of low outputs and parameters."""
    lo_backward: Format
    """Format of low output gradients."""
    weight_grad: Format = None  # type: ignore[assignment]  # __post_init__ makes it hi
    """Format of parameter gradients, low or not; ``hi`` by default."""
    saved: BlockFormat | None = None
    """Block format of saved copies, in native and packed storage. With fewer than 8 bits: of low outputs that backward
    reads only for gradients of weights. With 8 bits or more: of all low outputs that only backward reads
    (docs/compute.md, "Fewer than 8 bits"). None: ``lo_forward``."""
    operands: Operands | None = None
    """Block formats that GEMMs with a parameter round their operands to (docs/compute.md, "Operands in blocks"). None:
    no GEMM rounds operands."""
    pure: bool = False
    """Whether weights must already have ``hi``'s dtype, so that no tensor has a wider copy."""
    smooth_swiglu: bool = False
    """Whether channels of silu(g) * u that are far larger than most are scaled by powers of two before linear layers.
    The weights are scaled by the inverse (arXiv 2409.12517; docs/compute.md, "Channels of SwiGLU")."""
    name: str = "custom"
    """Name of the recipe in plans and reports."""

    def __post_init__(self) -> None:
        if self.weight_grad is None:
            object.__setattr__(self, "weight_grad", self.hi)
        for role in FORMAT_ROLES:
            object.__setattr__(self, role, _format(role, getattr(self, role)))
        object.__setattr__(self, "saved", checks.block_format("recipe.saved", self.saved, "int4"))
        object.__setattr__(self, "operands", find_operands(self.operands))
        for flag in RECIPE_FLAGS:
            checks.boolean(f"recipe.{flag}", getattr(self, flag))
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"recipe.name is {self.name!r}; give it a non-empty text")
        if self.pure and (self.hi.torch_dtype is None or self.hi.bits != 16):
            raise ConfigError(f"recipe.pure needs a 16-bit hi format that torch has a dtype for, not {self.hi.name}")
        for role in ("lo_forward", "lo_backward"):
            low: Format = getattr(self, role)
            if low.bits > self.hi.bits:
                raise ConfigError(
                    f"recipe.{role} is {low.name} ({low.bits} bits), wider than hi {self.hi.name} "
                    f"({self.hi.bits} bits); swap them or choose a narrower format"
                )

    @property
    def has_low(self) -> bool:
        """Whether the low format of a role differs from ``hi``; otherwise a policy has nothing to choose."""
        return self.lo_forward != self.hi or self.lo_backward != self.hi

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats of all roles, each once."""
        return tuple(dict.fromkeys(getattr(self, role) for role in FORMAT_ROLES))

    def format_of(self, kind: str, *, low: bool) -> Format:
        """Return the format of a tensor of ``kind`` ("output", "param", "grad_output", "grad_param")."""
        if kind == "grad_param":
            return self.weight_grad
        if not low:
            return self.hi
        return self.lo_backward if kind == "grad_output" else self.lo_forward

    def to_dict(self) -> dict[str, str | bool | dict[str, str | bool]]:
        """Return the names of the formats, ``{"name": "fp8", "hi": "bf16", ...}``, and the flags that are set."""
        formats = {role: getattr(self, role).name for role in FORMAT_ROLES}
        saved = {} if self.saved is None else {"saved": self.saved.name}
        operands = {} if self.operands is None else {"operands": self.operands.to_dict()}
        flags = {name: True for name in RECIPE_FLAGS if getattr(self, name)}
        return {"name": self.name, **formats, **flags, **saved, **operands}


RECIPE_FLAGS = ("pure", "smooth_swiglu")
FORMAT_ROLES = tuple(f.name for f in fields(Recipe) if f.name not in ("name", *RECIPE_FLAGS, "saved", "operands"))


def _format(role: str, value: object) -> Format:
    if isinstance(value, str) and value.strip().lower() in blocks.NAMED:
        raise ConfigError(f"recipe.{role} is the block format {value!r}, which only saved copies can have; use saved=")
    allowed = "a fxprec.Format or a format name such as 'e5m2' or '1-4-3+4'"
    return checks.format_of(f"recipe.{role}", value, Format, parse, allowed)


def _same(format: str, name: str | None = None, *, pure: bool = False, operands: Operands | None = None) -> Recipe:
    fmt = parse(format)
    return Recipe(name=name or format, hi=fmt, lo_forward=fmt, lo_backward=fmt, pure=pure, operands=operands)


def _every_product(format: str, **options: bool) -> Operands:
    fmt = find_blocks(format)
    return Operands(forward=fmt, input_grad=fmt, weight_grad=fmt, **options)


FP32 = _same("fp32")
"""float32 everywhere: nothing is planned or rounded, results equal plain Inductor's bit for bit, no memory is saved."""

BF16 = _same("bf16")
"""bf16 everywhere: half the memory, float32's range without overflow, 8 significant bits."""

BF16_PURE = _same("bf16", "bf16-pure", pure=True)
"""bf16 everywhere, weights included (Zamirai et al. 2020): call ``model.bfloat16()`` and train with `fxprec.optim`,
whose stochastic rounding or Kahan summation preserves small updates. No tensor has a float32 copy; norms and softmax
compute their row statistics in float32."""

FP16 = _same("fp16")
"""fp16 everywhere: 11 significant bits, more accurate than bf16, but gradients need scaling."""

FP8 = Recipe(name="fp8", hi=parse("bf16"), lo_forward=parse("e4m3fn"), lo_backward=parse("e5m2_sat"))
"""Hardware FP8: low tensors take half of bf16's memory and run on FP8 tensor cores; the loss of accuracy grows with
``low_ratio``. A gradient beyond e5m2's range saturates instead of becoming inf; it is counted and rescaled."""

HFP8 = Recipe(name="hfp8", hi=parse("1-6-9"), lo_forward=parse("1-4-3+4"), lo_backward=parse("1-5-2"))
"""The formats of Sun et al. 2019 as used by Lee et al. 2023, for comparison with the papers. No hardware has these
formats, so they are simulated unless ``storage="packed"`` stores their codes."""

MXFP8 = _same("bf16", "mxfp8", operands=_every_product("e4m3fn/32:e8m0up"))
"""bf16, but GEMMs with a parameter multiply MXFP8 operands: e4m3 in blocks of 32 that share a power of two, rounded up
so that nothing saturates (arXiv 2506.08027). Stored tensors stay in 16 bits. GPUs from compute capability 10.0 on
multiply the codes; other devices round values in the same way and multiply them in 16 bits."""

NVFP4 = _same("bf16", "nvfp4", operands=_every_product("nvfp4", square_weights=True, hadamard=True, stochastic=True))
"""bf16, but GEMMs with a parameter multiply NVFP4 operands: 4 bits in blocks of 16 with an e4m3 scale, with NVIDIA's
training recipe (arXiv 2509.25149): weights in 16 x 16 squares, stochastic rounding of gradients, a Hadamard matrix for
weight gradients. Keep some layers high with ``keep_high``. Devices multiply as for ``mxfp8``."""

RECIPES = MappingProxyType({r.name: r for r in (FP32, BF16, BF16_PURE, FP16, FP8, HFP8, MXFP8, NVFP4)})


_BLOCK_RECIPES = [f"{name}+int4" for name, recipe in RECIPES.items() if recipe.has_low]
ALLOWED_RECIPES = ", ".join(map(repr, (*RECIPES, *_BLOCK_RECIPES))) + " or a fxprec.Recipe"


def find_recipe(recipe: str | Recipe) -> Recipe:
    """Return the given recipe, or the recipe with that name; ``"fp8+int4"`` is ``fp8`` with ``saved="int4"``.

    Raises `ConfigError` for an unknown name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise ConfigError(f"recipe is {recipe!r}; give it one of {ALLOWED_RECIPES}")
    base, plus, saved = recipe.partition("+")
    if plus and base in RECIPES:
        if not saved.strip():
            raise ConfigError(f"recipe {recipe!r} names no block format after '+'; write for instance '{base}+int4'")
        fmt = checks.block_format("recipe.saved", saved.strip(), "int4")
        return replace(RECIPES[base], saved=fmt, name=recipe)
    if recipe not in RECIPES:
        hint = did_you_mean(recipe.lower(), RECIPES)
        raise ConfigError(f"unknown recipe {recipe!r}{hint}; allowed: {ALLOWED_RECIPES}")
    return RECIPES[recipe]
