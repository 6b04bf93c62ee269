"""Formats as data: limits, names, JSON, and the errors of formats that cannot be."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from collections.abc import Callable

import ml_dtypes
import pytest
import torch
from codec_oracles import FORMATS, ML_DTYPES, ids

from fxprec.errors import FormatError
from fxprec.numerics import formats
from fxprec.numerics.formats import Format, parse


@pytest.mark.parametrize(
    ("fmt", "largest", "smallest"),
    [  # docs/algorithms.md, "Number formats", and the papers
        (formats.HFP8_143, 30.0, 2.0**-13),
        (formats.HFP8_152, 114688.0, 2.0**-16),
        (formats.FP16_169, 2.0**32 * (2 - 2**-9), 2.0**-39),
        (formats.E4M3FN, 448.0, 2.0**-9),
        (formats.E5M2_SAT, 57344.0, 2.0**-16),
        (formats.APS_130, 16.0, 2.0**-2),
        (formats.APS_121, 6.0, 2.0**-1),
        (Format(8, 7), 2.0**127 * (2 - 2**-7), 2.0**-133),
    ],
    ids=str,
)
def test_limits(fmt: Format, largest: float, smallest: float) -> None:
    assert fmt.largest == largest
    assert fmt.smallest_subnormal == smallest


@pytest.mark.parametrize("fmt", [f for f in ML_DTYPES if f.bits != 16], ids=ids)
def test_limits_are_those_of_ml_dtypes(fmt: Format) -> None:
    info = ml_dtypes.finfo(ML_DTYPES[fmt])
    assert fmt.largest == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert fmt.bits == info.bits


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.torch_dtype is not None], ids=ids)
def test_limits_are_those_of_the_native_dtype(fmt: Format) -> None:
    info = torch.finfo(fmt.torch_dtype)
    assert (fmt.largest, fmt.smallest_normal, fmt.bits) == (info.max, info.smallest_normal, info.bits)


def test_code_dtype_is_the_smallest_that_fits() -> None:
    assert formats.APS_130.code_dtype == formats.HFP8_143.code_dtype == torch.uint8
    assert Format(8, 0).code_dtype == formats.FP16_169.code_dtype == torch.uint16
    assert Format(8, 8).code_dtype == formats.FP32.code_dtype == torch.uint32


def test_only_same_bits_are_native() -> None:
    assert formats.E5M2.torch_dtype == formats.E5M2_SAT.torch_dtype == torch.float8_e5m2
    assert formats.HFP8_152.torch_dtype is None  # its top exponent codes are numbers


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_name_and_json_lead_back_to_the_format(fmt: Format) -> None:
    assert parse(fmt.name) == fmt
    assert Format.from_dict(json.loads(json.dumps(fmt.to_dict()))) == fmt


@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        ("E4M3FN", formats.E4M3FN),
        ("bfloat16", formats.BF16),
        ("1-4-3+4", formats.HFP8_143),
        ("1-5-2", formats.HFP8_152),
        ("1-5-2:ieee", formats.E5M2),
        ("1-4-3-2:fn:nan", Format(4, 3, -2, "fn", "nan")),
        (" 1-6-9 ", formats.FP16_169),
    ],
)
def test_parse(name: str, fmt: Format) -> None:
    assert parse(name) == fmt
    assert parse(fmt) is fmt


def test_canonical_names() -> None:
    assert [f.name for f in (formats.E5M2_SAT, formats.HFP8_143, formats.APS_130)] == ["e5m2_sat", "1-4-3+4", "1-3-0"]
    assert Format(4, 3, -2, "fn", "nan").name == "1-4-3-2:fn:nan"


def test_contains() -> None:
    assert formats.BF16.contains(formats.E5M2)
    assert not formats.BF16.contains(formats.FP16)  # three mantissa bits short
    assert not formats.FP16.contains(formats.BF16)  # range short
    assert not formats.FP16.contains(formats.FP16_169)


def message_of(make: Callable[..., object], *args: object, **fields: object) -> str:
    with pytest.raises(FormatError) as caught:
        make(*args, **fields)
    assert "\n" not in str(caught.value), "an error is one line"
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"exponent_bits": 0, "mantissa_bits": 3},
            "exponent_bits=0 is out of range for a float of at most 32 bits; use 1 to 8",
        ),
        ({"exponent_bits": 9, "mantissa_bits": 3}, "exponent_bits=9"),
        (
            {"exponent_bits": 4, "mantissa_bits": 24},
            "mantissa_bits=24 is out of range for a float of at most 32 bits; use 0 to 23",
        ),
        ({"exponent_bits": 4, "mantissa_bits": -1}, "mantissa_bits=-1"),
        ({"exponent_bits": 4.0, "mantissa_bits": 3}, "exponent_bits=4.0 is not an integer; use 1 to 8"),
        ({"exponent_bits": True, "mantissa_bits": 3}, "exponent_bits=True is not an integer"),
        (
            {"exponent_bits": 4, "mantissa_bits": 3, "bias": 0.5},
            "bias=0.5 is not an integer; a format's bias is a whole",
        ),
        (
            {"exponent_bits": 4, "mantissa_bits": 3, "specials": "ocp"},
            "specials='ocp' is unknown; use one of ['fn', 'ieee', 'none']",
        ),
        (
            {"exponent_bits": 4, "mantissa_bits": 3, "overflow": "inf"},
            "overflow='inf' has no code in a format with specials='none'; use one of ['saturate']",
        ),
        (
            {"exponent_bits": 1, "mantissa_bits": 3, "specials": "ieee"},
            "1-1-3 cannot be IEEE-like: inf and NaN need an exponent",
        ),
        ({"exponent_bits": 1, "mantissa_bits": 0, "specials": "fn"}, "no code to spare"),
        ({"exponent_bits": 4, "mantissa_bits": 3, "bias": 400}, "spans 2^-406 to"),
        (
            {"exponent_bits": 8, "mantissa_bits": 3, "bias": 100},
            "1-8-3 with bias 100 spans 2^-226 to 2^28, beyond float32, in which every value is computed; choose a bias",
        ),
        ({"exponent_bits": 4, "mantissa_bits": 3, "bias": -130}, "beyond float32"),
        ({"exponent_bits": 8, "mantissa_bits": 3, "specials": "fn"}, "beyond float32"),
    ],
)
def test_a_format_that_cannot_be(fields: dict[str, object], words: str) -> None:
    assert words in message_of(Format, **fields)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("e4m3", "unknown format 'e4m3'; did you mean 'e4m3fn'?; use one of"),
        (
            "1-4",
            "unknown format '1-4'; use one of ['fp32', 'fp16', 'fp16_sat', 'bf16', 'e5m2', 'e5m2_sat', 'e4m3fn', "
            "'e4m3fn_nan'] or 1-E-M",
        ),
        ("1-0-3", "exponent_bits=0"),
        ("2-4-3", "1-E-M"),
        ("", "unknown format"),
        (7, "7 is not a format; give a fxprec.Format or a name such as 'e4m3fn'"),
        (None, "None is not a format"),
    ],
)
def test_a_name_that_is_none(name: object, words: str) -> None:
    assert words in message_of(parse, name)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"exponent_bits": 4}, "needs 'mantissa_bits'"),
        (
            {"exponent_bits": 4, "mantisa_bits": 3},
            "a format has no field 'mantisa_bits'; did you mean 'mantissa_bits'?; use",
        ),
        ({"exponent_bits": "4", "mantissa_bits": 3}, "'4' is not an integer"),
        ({"exponent_bits": 4, "mantissa_bits": 3, "specials": []}, "is unknown; use one of"),
    ],
)
def test_json_that_is_no_format(fields: dict[str, object], words: str) -> None:
    assert words in message_of(Format.from_dict, fields)


def test_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        formats.BF16.bias = 1  # type: ignore[misc]
    assert len({Format(5, 2), formats.HFP8_152, formats.E5M2}) == 2
    assert math.isfinite(formats.FP32.largest)


def test_a_format_pickles_alike_whatever_was_asked_of_it() -> None:
    asked, fresh = (Format(4, 3, specials="fn") for _ in range(2))
    before = pickle.dumps(fresh)
    assert (asked.largest, asked.smallest_normal) == (448.0, 2.0**-6)
    assert pickle.dumps(asked) == before
    assert pickle.loads(before) == copy.deepcopy(asked) == asked
