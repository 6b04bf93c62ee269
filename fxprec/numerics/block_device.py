"""Triton kernels of block formats: one program encodes, or decodes, the blocks of 2048 elements.

Their arithmetic is printed from `block_codec` with a format's constants folded in. This module adds loads, reductions
over a block, packing and stores. It reads elements in row-major order, and writes records as `block_codec.records`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from fxprec.numerics import block_codec, device
from fxprec.numerics.blocks import BlockFormat
from fxprec.numerics.trace import Kind

ELEMENTS = 2048
WARPS = 4


@dataclass(frozen=True)
class BlockKernel:
    """A kernel's source. Its parameters are ``pointers``, then ``integers``: ``n`` elements, the cast's ``salt``."""

    name: str
    source: str
    pointers: tuple[str, ...]
    """``x`` or ``q``, then ``seed`` and ``whole`` if the kernel reads them, then ``out``."""
    integers: tuple[str, ...]
    per_program: int
    """Blocks per program."""

    def parameters(self, wide: str) -> list[tuple[str, str]]:
        """Return each parameter's name and Triton type; ``wide`` is the type of the tensor's elements."""
        kinds = {"x": wide, "seed": "i32", "whole": "fp32", "q": "u8", "out": "u8" if "x" in self.pointers else wide}
        return [(p, f"*{kinds[p]}") for p in self.pointers] + [(i, "i32") for i in self.integers]


def identifier(fmt: BlockFormat) -> str:
    """Return a format's name as part of a Python name."""
    return re.sub(r"\W", "_", fmt.name.replace("+", "_p").replace("*", "_whole"))


def store_kernel(fmt: BlockFormat, *, stochastic: bool) -> BlockKernel:
    """Return the kernel that encodes, rounding stochastically or to nearest."""
    name = f"store_{identifier(fmt)}{'_random' if stochastic else ''}"
    pointers = ("x", *(["seed"] if stochastic else []), *(["whole"] if fmt.tensor_scale else []), "out")
    integers = ("n", "salt") if stochastic else ("n",)
    whole, shared = (
        (", tl.load(whole)" if fmt.tensor_scale else ""),
        ("scale, offset, inverse, origin" if fmt.has_offset else "scale, inverse"),
    )
    origin, random = (", origin" if fmt.has_offset else ""), (", random" if stochastic else "")
    lines = [
        *_tile(fmt),
        "value = tl.load(x + tl.minimum(at, n - 1), mask=inside, other=0.0).to(tl.float32)",
        "bits = value.to(tl.int32, bitcast=True)",
        *_ends(fmt),
        f"{shared} = head(ends{', high' if fmt.has_offset else ''}{whole})",
        *(["random = random_bits(at.to(tl.int32), tl.load(seed) + salt)"] if stochastic else []),
        f"code = element(value, inverse{origin}{random})",
        *_stored(fmt),
    ]
    helpers = [_head(fmt, stochastic), _element(fmt, stochastic)]
    helpers += [_ordered()] if fmt.has_offset else []
    helpers += [_random()] if stochastic else []
    return _kernel(name, lines, helpers, pointers, integers, fmt)


def load_kernel(fmt: BlockFormat) -> BlockKernel:
    """Return the kernel that decodes to the dtype of ``out``, float32 or bfloat16."""
    pointers = ("q", *(["whole"] if fmt.tensor_scale else []), "out")
    ends = ["scale", *(["offset"] if fmt.has_offset else [])]
    lines = [
        *_tile(fmt),
        f"record = q + k * {fmt.head_bytes + fmt.code_bytes}",
        *_ends_loaded(fmt, ends),
        *_codes_loaded(fmt),
        f"value = number(code, {', '.join(ends)}{', tl.load(whole)' if fmt.tensor_scale else ''})",
        "if out.dtype.element_ty == tl.bfloat16:",
        "    short = (as_bfloat16(value).to(tl.int32, bitcast=True) >> 16).to(tl.int16)",
        "    tl.store(out + at, short.to(tl.bfloat16, bitcast=True), mask=at < n)",
        "else:",
        "    tl.store(out + at, value, mask=at < n)",
    ]
    helpers = [_number(fmt), device.bfloat16_source("as_bfloat16")]
    return _kernel(f"load_{identifier(fmt)}", lines, helpers, pointers, ("n",), fmt)


def _kernel(
    name: str,
    lines: list[str],
    helpers: list[str],
    pointers: tuple[str, ...],
    integers: tuple[str, ...],
    fmt: BlockFormat,
) -> BlockKernel:
    body = "".join(f"    {line}\n" for line in lines)
    kernel = f"@triton.jit\ndef {name}({', '.join((*pointers, *integers))}):\n{body}"
    return BlockKernel(name, device.IMPORTS + "\n\n".join([*helpers, kernel]), pointers, integers, _per_program(fmt))


def _per_program(fmt: BlockFormat) -> int:
    return max(1, ELEMENTS // fmt.block)


def _tile(fmt: BlockFormat) -> list[str]:
    return [
        f"k = (tl.program_id(0).to(tl.int64) * {_per_program(fmt)} + tl.arange(0, {_per_program(fmt)}))[:, None]",
        f"at = k * {fmt.block} + tl.arange(0, {fmt.block})[None, :]",
        f"inside = k * {fmt.block} < n",
    ]


def _ends(fmt: BlockFormat) -> list[str]:
    if not fmt.has_offset:
        return ["ends = tl.max(bits & 0x7FFFFFFF, axis=1, keep_dims=True)"]
    ends = (
        f"{name} = tl.{reduction}(key, axis=1, keep_dims=True)"
        for name, reduction in (("ends", "min"), ("high", "max"))
    )
    return ["key = ordered(bits)", *ends]


def _stored(fmt: BlockFormat) -> list[str]:
    count, size = block_codec.word(fmt.bits)
    words, step = fmt.block // count, fmt.scale_dtype.itemsize
    lines = [f"record = out + k * {fmt.head_bytes + fmt.code_bytes}"]
    for i, end in enumerate(("scale", "offset")[: 1 + fmt.has_offset]):
        lines += [
            f"tl.store(record + {i * step + j}, ({end} >> {8 * j}).to(tl.uint8), mask=inside)" for j in range(step)
        ]
    if count > 1:
        lines += [
            f"spread = tl.reshape(code, [{_per_program(fmt)}, {words}, {count}])",
            f"code = tl.sum(spread << (tl.arange(0, {count}) * {fmt.bits})[None, None, :], axis=2)",
        ]
    place = f"record + {fmt.head_bytes} + tl.arange(0, {words})[None, :] * {size}"
    return lines + [f"tl.store({place} + {j}, (code >> {8 * j}).to(tl.uint8), mask=inside)" for j in range(size)]


def _ends_loaded(fmt: BlockFormat, ends: list[str]) -> list[str]:
    step = fmt.scale_dtype.itemsize
    parts = {end: [_byte(f"record + {i * step + j}", j) for j in range(step)] for i, end in enumerate(ends)}
    return [f"{end} = {' | '.join(loads)}" for end, loads in parts.items()]


def _codes_loaded(fmt: BlockFormat) -> list[str]:
    count, size = block_codec.word(fmt.bits)
    words = fmt.block // count
    place = f"record + {fmt.head_bytes} + tl.arange(0, {words})[None, :] * {size}"
    lines = [f"code = {' | '.join(_byte(f'{place} + {j}', j) for j in range(size))}"]
    if count > 1:
        lines += [
            f"spread = code[:, :, None] >> (tl.arange(0, {count}) * {fmt.bits})[None, None, :]",
            f"code = tl.reshape(spread & {(1 << fmt.bits) - 1}, [{_per_program(fmt)}, {fmt.block}])",
        ]
    return lines


def _byte(place: str, position: int) -> str:
    load = f"tl.load({place}, mask=inside, other=0).to(tl.int32)"
    return f"({load} << {8 * position})" if position else load


def _head(fmt: BlockFormat, stochastic: bool) -> str:
    def text(*values: Tensor) -> tuple[Tensor, ...]:
        ends, whole = values[: 1 + fmt.has_offset], values[-1] if fmt.tensor_scale else None
        found = block_codec.head(ends, fmt, whole, stochastic=stochastic)
        return tuple(part for part in found if part is not None)

    own: dict[str, Kind] = dict.fromkeys(("low", "high") if fmt.has_offset else ("amax",), "int")
    return device.function("head", own | _whole(fmt), f"Scale, and inverse, of a block of {fmt.name}.", text)


def _element(fmt: BlockFormat, stochastic: bool) -> str:
    own: dict[str, Kind] = {"x": "float", "inverse": "float"}
    own |= {"origin": "float"} if fmt.has_offset else {}
    own |= {"random": "int"} if stochastic else {}

    def text(*values: Tensor) -> Tensor:
        given = dict(zip(own, values, strict=True))
        return block_codec.element_codes(given["x"], given["inverse"], given.get("origin"), given.get("random"), fmt)

    return device.function("element", own, f"Codes of elements of {fmt.name}.", text)


def _number(fmt: BlockFormat) -> str:
    own: dict[str, Kind] = {"code": "int", "scale": "int"}
    own |= {"offset": "int"} if fmt.has_offset else {}
    own |= _whole(fmt)

    def text(*values: Tensor) -> Tensor:
        given = dict(zip(own, values, strict=True))
        return block_codec.numbers(given["code"], given["scale"], given.get("offset"), given.get("whole"), fmt)

    return device.function("number", own, f"Numbers of {fmt.name}.", text)


def _whole(fmt: BlockFormat) -> dict[str, Kind]:
    return {"whole": "float"} if fmt.tensor_scale else {}


@cache
def _ordered() -> str:
    return device.function("ordered", {"bits": "int"}, "Integers in the order of numbers.", block_codec.ordered)


@cache
def _random() -> str:
    own: dict[str, Kind] = {"index": "int", "seed": "int"}
    return device.function("random_bits", own, "31 random bits.", block_codec.random_bits)
