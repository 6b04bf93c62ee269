"""`Operands`: the block formats of the operands of matrix products with a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from fxprec.config import checks
from fxprec.errors import ConfigError
from fxprec.numerics.blocks import BlockFormat

Product: TypeAlias = Literal["forward", "input_grad", "weight_grad"]
_LARGEST_SIDE = 64
"""Largest n of a square: a square is a block of n x n elements, and the largest block has 4096 elements."""
TURNS = (16, 32, 64, 128)
"""Sizes of the Hadamard matrix of `Operands.eden`."""
PRODUCTS: tuple[Product, ...] = ("forward", "input_grad", "weight_grad")


@dataclass(frozen=True, kw_only=True)
class Operands(checks.Options):
    """Block formats of the operands of each product of a layer, in blocks along the dimension that the product reduces.

    A format is a `BlockFormat` or its name; None leaves the product's operands in ``hi``. Raises `ConfigError` for a
    format without blocks, for integers in blocks, and for an option that affects no product.
    """

    forward: BlockFormat | None = None
    """Format of input and weight in the forward product."""
    input_grad: BlockFormat | None = None
    """Format of incoming gradient and weight in the product that computes the input's gradient."""
    weight_grad: BlockFormat | None = None
    """Format of incoming gradient and input in the weight gradient's product; blocks run along the tokens."""
    square_weights: bool = False
    """Whether a square of n x n weight elements shares a scale, instead of a row of n. Forward and backward then
    multiply the same rounded weight (arXiv 2509.25149)."""
    hadamard: bool = False
    """Whether both operands of the weight gradient are first multiplied, 16 tokens at a time, by a random Hadamard
    matrix. The matrix spreads outliers over 16 elements, and cancels in the product (arXiv 2509.25149)."""
    stochastic: bool = False
    """Whether incoming gradients are rounded stochastically, so that their mean is exact, instead of to nearest."""
    eden: int = 0
    """Size of a random Hadamard matrix, 16, 32, 64 or 128, or 0 for none. Both operands of the gradients' products are
    multiplied by the matrix and rounded to nearest; the scales of each vector's blocks are corrected and rounded
    stochastically (MS-EDEN, arXiv 2601.22813, which uses 128). Replaces ``hadamard`` and ``stochastic``."""
    high_after: int = 0
    """Training steps after which all products multiply operands in ``hi``, for the end of a training (arXiv 2509.25149,
    appendix D). The graph is recompiled once. 0: never."""

    def __post_init__(self) -> None:
        for name in PRODUCTS:
            object.__setattr__(self, name, operand_format(name, getattr(self, name)))
        for flag in _FLAGS:
            checks.boolean(f"operands.{flag}", getattr(self, flag))
        if isinstance(self.eden, bool) or self.eden not in (0, *TURNS):
            raise ConfigError(
                f"operands.eden is {self.eden!r}; give it the length of the vectors to rotate, one of {TURNS}, or 0"
            )
        checks.integer("operands.high_after", self.high_after, least=0)
        if not any(getattr(self, name) for name in PRODUCTS):
            raise ConfigError(f"operands names no format; give one of {', '.join(PRODUCTS)}, or leave operands out")
        if self.square_weights:
            self._check_squares()
        if self.hadamard and self.weight_grad is None:
            raise ConfigError("operands.hadamard rotates the operands of weight_grad, which has no format; give it one")
        if self.stochastic and self.input_grad is None and self.weight_grad is None:
            raise ConfigError(
                "operands.stochastic rounds gradients, and neither input_grad nor weight_grad has a format; give one"
            )
        if self.eden:
            self._check_eden()

    def _check_eden(self) -> None:
        if self.hadamard or self.stochastic:
            raise ConfigError(
                "operands.eden already rotates and rounds the operands that hadamard and stochastic are for; leave "
                "these two out"
            )
        found = [fmt for fmt in (self.input_grad, self.weight_grad) if fmt is not None]
        if not found:
            raise ConfigError(
                "operands.eden rounds the operands of gradients, and neither input_grad nor weight_grad has a format; "
                "give one"
            )
        for fmt in found:
            reason = eden_refusal(fmt, self.eden)
            if reason:
                raise ConfigError(f"operands.eden: {reason}; use 'nvfp4', or stochastic")

    def _check_squares(self) -> None:
        read = [fmt for fmt in (self.forward, self.input_grad) if fmt is not None]
        if not read:
            raise ConfigError(
                "operands.square_weights rounds weights, which forward and input_grad multiply, and neither has a "
                "format; give one"
            )
        for fmt in read:
            if fmt.block > _LARGEST_SIDE:
                raise ConfigError(
                    f"operands.square_weights would make squares of {fmt.block} x {fmt.block} elements of {fmt.name}; "
                    f"use blocks of at most {_LARGEST_SIDE}"
                )

    def to_dict(self) -> dict[str, str | bool | int]:
        """Return the names of the formats, and the options that are set."""
        formats = {name: fmt.name for name in PRODUCTS if (fmt := getattr(self, name)) is not None}
        return formats | {name: value for name in (*_FLAGS, *_NUMBERS) if (value := getattr(self, name))}


_NUMBERS = ("eden", "high_after")
_FLAGS = tuple(f.name for f in fields(Operands) if f.name not in (*PRODUCTS, *_NUMBERS))


def eden_refusal(fmt: BlockFormat, size: int) -> str | None:
    """Return why a format's scales cannot be corrected by one factor per ``size`` elements, or None if they can."""
    if fmt.has_power_scale:
        return f"the scales of {fmt.name} are powers of two, which cannot be corrected by a few percent"
    if fmt.block > size:
        return f"blocks of {fmt.name} are larger than the {size} elements that are rotated together"
    return None


def operand_format(name: str, value: object) -> BlockFormat | None:
    """Return the block format of a product's operands, or None. Raises `ConfigError` for an unsuitable format."""
    fmt = checks.block_format(f"operands.{name}", value, "mxfp8")
    if fmt is not None and fmt.has_offset:
        raise ConfigError(
            f"operands.{name} is {fmt.name}, integers with an offset, which no GEMM multiplies; give it a format of "
            "floats in blocks, such as 'mxfp8' or 'nvfp4'"
        )
    return fmt


def find_operands(value: Operands | Mapping[str, Any] | None) -> Operands | None:
    """Return a recipe's `Operands`, given as such, as a mapping, or None. Raises `ConfigError` for other values."""
    if value is None or isinstance(value, Operands):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return Operands(**value)
    raise ConfigError(
        f"recipe.operands is {value!r}; give it a fxprec.Operands, such as Operands(forward='mxfp8'), or None"
    )
