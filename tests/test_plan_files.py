"""Corrupt and hostile plan files: each is a one-line PlanError with the file, the entry, the cause, the way out."""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxprec.config.recipes import RECIPES
from fxprec.errors import PlanError
from fxprec.plan import Gemm, Group, KindCounts, Plan, Site
from fxprec.plan.files import MAX_BYTES, dumps

PLAN = Plan(
    gemms=(Gemm(id=0, node="mm", op="aten.mm", module="fc", group_before=0, group_after=1),),
    groups=tuple(
        Group(id=i, elements=n, elements_by_kind=KindCounts(output=n), low=False, order=i) for i, n in enumerate((6, 2))
    ),
    sites=tuple(
        Site(id=i, tensor="x", kind=kind, module="", shape="2", group=i, format="bf16", direction=direction)
        for i, (kind, direction) in enumerate((("output", "forward"), ("grad_output", "backward")))
    ),
    recipe=RECIPES["fp8"],
    total_elements=8,
)
TEXT = dumps(PLAN)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def error_of(path: Path) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert len(text) < len(str(path)) + 400, "what was in the file is shown in short"
    return text.removeprefix(f"{path}: ")


def edited(keys: tuple[str | int, ...], value: object) -> str:
    """The good plan with one value replaced (a missing key is added)."""
    data = json.loads(TEXT)
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return json.dumps(data)


def without(*keys: str | int) -> str:
    data = json.loads(TEXT)
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    del inner[keys[-1]]
    return json.dumps(data)


HUGE = 10**400


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("sites", 1, "format"), "bf61", "sites[1].format: unknown format 'bf61'; did you mean 'bf16'?"),
        (("sites", 1, "format"), "e9", "sites[1].format: unknown format 'e9'; use one of ['fp32', 'fp16', 'fp16_sat',"),
        (("sites", 1, "format"), "x" * 9999, "sites[1].format: is 'xxx"),
        (("sites", 1, "format"), 3, "sites[1].format: is 3; it must be text"),
        (("policy",), "\ud800", r"policy: is '\ud800'; it must be text without halves of surrogate pairs"),
        (("sites", 0, "kind"), "outptu", "sites[0].kind: is 'outptu'; it must be one of 'output', 'param'"),
        (("sites", 0, "kind"), [], "sites[0].kind: is []; it must be one of"),
        (("sites", 0, "direction"), "backward", "sites[0].direction: is 'backward' for kind 'output'; gradients are"),
        (("sites", 1, "promoted_at"), 3, "sites[1].promoted_at: is set for a gradient; gradients are never promoted"),
        (("sites", 0, "promoted_at"), -1, "sites[0].promoted_at: is -1; it must be an int from 0 to 2**63 - 1"),
        (("sites", 1, "id"), 0, "sites[1].id: is 0, which entry 0 has already; number the entries 0, 1, 2, ..."),
        (("sites", 1, "id"), 5, "sites[1].id: is 5, not 1; number the entries"),
        (("sites", 1, "group"), 2, "sites[1].group: is 2, and there is no such group; name one in 'groups'"),
        (("gemms", 0, "group_after"), 9, "gemms[0].group_after: is 9, and there is no such group"),
        (("gemms", 0, "id"), True, "gemms[0].id: is True; it must be an int"),
        (("groups", 0, "low"), 1, "groups[0].low: is 1; it must be true or false"),
        (("groups", 0, "elements"), 7, "groups[0].elements: is 7, but its kinds add up to 6; plan again"),
        (("groups", 0, "elements"), 6.0, "groups[0].elements: is 6.0; it must be an int"),
        (("groups", 1, "order"), 0, "groups[1].order: is 0, as for group 0; give each group a position of its own"),
        (("groups", 1, "operators"), "relu", "groups[1].operators: is 'relu'; it must be an array"),
        (("groups", 1, "operators"), [None], "groups[1].operators[0]: is None; it must be text"),
        (("groups", 1, "elements_by_kind"), [], "groups[1].elements_by_kind: is []; it must be an object"),
        (("groups",), {}, "groups: is {}; it must be an array"),
        (("groups",), [[]], "groups[0]: is []; it must be an object"),
        (("total_elements",), 9, "total_elements: is 9, but the groups add up to 8; plan again"),
        (("total_elements",), HUGE, "holds an integer of 401 digits; the largest allowed is 2**63 - 1"),
        (("total_elements",), 2**63, "total_elements: is 9223372036854775808; it must be an int from 0 to"),
        (("requested_low_ratio",), 1.5, "requested_low_ratio: is 1.5; it must be a number from 0 to 1"),
        (("requested_low_ratio",), True, "requested_low_ratio: is True; it must be a finite number"),
        (("achieved_low_ratio",), float("nan"), "holds NaN, which is not a JSON number; write a finite number or null"),
        (("achieved_low_ratio",), float("-inf"), "holds -Infinity, which is not a JSON number"),
        (("storage",), "nativ", "storage: is 'nativ'; it must be one of 'native', 'packed', 'simulate'; did you mean"),
        (("recipe",), "fp8", "recipe: is 'fp8'; it must be an object"),
        (("recipe", "lo_forward"), "fp32", "recipe.lo_forward is fp32 (32 bits), wider than hi bf16"),
        (("recipe", "operands"), {"forward": "int4"}, "operands.forward is int4, integers with an offset"),
        (
            ("recipe", "operands"),
            {"forwards": "nvfp4"},
            "recipe.operands: has an unknown key 'forwards'; did you mean 'forward'?",
        ),
        (("recipe", "operands"), {"hadamard": True}, "operands names no format"),
        (
            ("recipe", "operands"),
            {"weight_grad": "nvfp4", "eden": True},
            "recipe.operands.eden: is True; it must be an int",
        ),
        (
            ("recipe", "operands"),
            {"weight_grad": "nvfp4", "eden": 8},
            "operands.eden is 8; give it the length of the vectors to rotate",
        ),
        (("saved_bytes",), {"fp32": 1, "planned": None}, "saved_bytes.planned: is None; it must be an int"),
        (("schema",), 2, "schema: is 2, and this fxprec reads 1; plan again with this version, or install"),
        (("schema",), "1", "schema: is '1', and this fxprec reads 1"),
        (
            ("sites", 0, "reads"),
            "backwards",
            "sites[0].reads: is 'backwards'; it must be one of 'backward', 'gemm codes'",
        ),
        (("sites", 0, "why"), "a\nb", "sites[0].why: is 'a\\nb'; it must be one line of at most 200 characters"),
        (("sites", 0, "why"), "x" * 201, "sites[0].why: is 'xxx"),
        (("sites", 0, "why"), None, "sites[0].why: is None; it must be text"),
        (("sites", 0, "formt"), "bf16", "sites[0]: has an unknown key 'formt'; did you mean 'format'?; remove it"),
        (("policy",), "x" * 200_000, "policy: is text of 200000 characters; the longest allowed has 100000"),
        (("x" * 5000,), 1, "top level: has an unknown key 'xxxxx"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(path, keys, value, message):
    path.write_text(edited(keys, value))
    assert error_of(path).startswith(message)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("schema",), "top level: has no 'schema'; add it, or plan again"),
        (("sites",), "top level: has no 'sites'"),
        (("sites", 0, "format"), "sites[0]: has no 'format'"),
        (("gemms", 0, "node"), "gemms[0]: has no 'node'"),
        (("recipe", "lo_backward"), "recipe: has no 'lo_backward'"),
    ],
)
def test_a_missing_key_is_named(path, keys, message):
    path.write_text(without(*keys))
    assert error_of(path).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON at line 1, column 1: Expecting value; the file may be truncated; write it again"),
        (TEXT[:-40].encode(), "is not valid JSON at line "),
        (
            b"{",
            "is not valid JSON at line 1, column 2: Expecting property name enclosed in double quotes; the file may be",
        ),
        (b"[]", "top level: is []; it must be an object"),
        (b"null", "top level: is None; it must be an object"),
        (b'"' + b"a" * 5000 + b'"', "top level: is 'aaaa"),
        (b"\xff\xfe\x00", "is not UTF-8 (byte 0); give a plan file"),
        (TEXT.encode("utf-16"), "is not UTF-8 (byte 0)"),
        (b'{"schema": 1, "schema": 1}', "holds the key 'schema' twice in one object; remove one"),
        (b"[" * 200_000 + b"]" * 200_000, "is nested too deeply for a plan file"),
        (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "is nested too deeply for a plan file"),
        (b"[" + b"0," * 5_000_000 + b"0]", "holds more than 4000000 values, so it is not a plan file"),
        (b"cos\nsystem\n(S'echo hello'\ntR.", "is not valid JSON at line 1, column 1"),
    ],
    ids=lambda value: None if isinstance(value, str) else f"{len(value)} bytes",
)
def test_what_is_no_plan_is_refused(path, content, message):
    path.write_bytes(content)
    assert error_of(path).startswith(message)


def test_a_plan_is_an_object():
    with pytest.raises(PlanError, match=r"^top level: is 3; it must be an object"):
        Plan.from_dict(3)  # type: ignore[arg-type]


def test_a_float_that_overflows_is_refused(path):
    path.write_text(TEXT.replace('"bit_ratio": 0.0', '"bit_ratio": 1e999'))
    assert error_of(path).startswith("bit_ratio: is inf; it must be a finite number")


def test_a_file_beyond_the_limit_is_not_parsed(path):
    with path.open("wb") as file:
        file.truncate(50 * MAX_BYTES)  # sparse: takes no disk
    started = time.monotonic()
    assert error_of(path).startswith("is larger than 64 MiB, so it is not a plan file")
    assert time.monotonic() - started < 5


def test_what_is_no_regular_file_is_refused_without_blocking(path, tmp_path):
    assert error_of(path).startswith("cannot be read: No such file or directory; give the path of a plan file")
    assert error_of(tmp_path).startswith("is not a regular file; give the path of a plan file")
    os.mkfifo(path)
    assert error_of(path).startswith("is not a regular file")
    path.unlink()
    path.symlink_to(path)
    assert error_of(path).startswith("cannot be read: Too many levels of symbolic links")
    path.unlink()
    path.symlink_to(tmp_path / "gone")
    assert error_of(path).startswith("cannot be read: No such file or directory")
    path.unlink()
    path.symlink_to(os.devnull)
    assert error_of(path).startswith("is not a regular file")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
places = st.sampled_from(
    [
        (table, i, key)
        for table, rows in PLAN.to_dict().items()
        if isinstance(rows, list)
        for i, row in enumerate(rows)
        for key in row
    ]
    + [(key,) for key in PLAN.to_dict()]
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(places, json_values)
def test_any_value_anywhere_loads_or_is_a_plan_error(tmp_path_factory, place, value):
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_text(edited(place, value))
    try:
        loaded = Plan.load(path)
    except PlanError:
        return
    assert loaded.to_dict() == PLAN.to_dict() | json.loads(path.read_text()), "what loads is what the file says"


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, len(TEXT) - 1), st.integers(0, 255))
def test_any_changed_byte_loads_or_is_a_plan_error(tmp_path_factory, at, byte):
    path = tmp_path_factory.getbasetemp() / "flipped.json"
    path.write_bytes(TEXT[:at].encode() + bytes([byte]) + TEXT[at + 1 :].encode())
    with contextlib.suppress(PlanError):
        Plan.load(path)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, len(TEXT) - 3))
def test_a_truncated_file_is_a_plan_error(tmp_path_factory, length):
    path = tmp_path_factory.getbasetemp() / "truncated.json"
    path.write_text(TEXT[:length])
    with pytest.raises(PlanError, match="not valid JSON"):
        Plan.load(path)
