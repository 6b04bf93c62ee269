"""Config, recipes and their errors: the words a user sees are part of the contract."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxprec.config import ALLOWED, Config, Settings
from fxprec.config.grad_scaling import GradScaling
from fxprec.config.recipes import RECIPES, Recipe
from fxprec.errors import ConfigError
from fxprec.numerics import formats

PAPER_LOW = {"lo_forward": "1-4-3+4", "lo_backward": "1-5-2"}


def message_of(**options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Config(**options)
    text = str(caught.value)
    assert "\n" not in text, "an error is one line"
    return text


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("fp32", ("fp32", "fp32", "fp32", "fp32")),
        ("bf16", ("bf16", "bf16", "bf16", "bf16")),
        ("fp16", ("fp16", "fp16", "fp16", "fp16")),
        ("fp8", ("bf16", "e4m3fn", "e5m2_sat", "bf16")),
        ("hfp8", ("1-6-9", "1-4-3+4", "1-5-2", "1-6-9")),
    ],
)
def test_named_recipe_has_the_formats_of_the_architecture(name, roles):
    recipe = Settings.of(Config(recipe=name)).recipe
    assert recipe.name == name
    expected = tuple(map(formats.parse, roles))
    assert (recipe.hi, recipe.lo_forward, recipe.lo_backward, recipe.weight_grad) == expected


def test_recipe_takes_formats_or_names_and_defaults_weight_gradients_to_high():
    by_name = Recipe(hi="bf16", lo_forward="e4m3fn", lo_backward="e5m2", name="mine")
    by_format = Recipe(hi=formats.BF16, lo_forward=formats.E4M3FN, lo_backward=formats.E5M2, name="mine")
    assert by_name == by_format
    assert by_name.weight_grad == formats.BF16


def test_format_of_follows_the_role_table():
    recipe = RECIPES["hfp8"]
    low = {kind: recipe.format_of(kind, low=True).name for kind in ("output", "param", "grad_output", "grad_param")}
    lo_f, lo_b, hi = recipe.lo_forward.name, recipe.lo_backward.name, recipe.hi.name
    assert low == {"output": lo_f, "param": lo_f, "grad_output": lo_b, "grad_param": hi}
    assert {recipe.format_of(kind, low=False).name for kind in low} == {hi}


@pytest.mark.parametrize(
    ("options", "storage"),
    [
        ({"recipe": "bf16"}, "native"),
        ({"recipe": "fp16"}, "native"),
        ({"recipe": "fp8"}, "native"),
        ({"recipe": "hfp8"}, "simulate"),
        ({"recipe": "hfp8", "storage": "packed"}, "packed"),
        ({"recipe": "fp8", "storage": "simulate"}, "simulate"),
        ({"recipe": Recipe(hi="bf16", **PAPER_LOW)}, "simulate"),
    ],
)
def test_storage_is_native_exactly_where_torch_has_every_dtype(options, storage):
    assert Settings.of(Config(**options)).storage == storage


def test_the_default_ratio_applies_only_where_something_can_be_low():
    assert Settings.of(Config(recipe="fp8")).low_ratio == 1
    assert Settings.of(Config(recipe="fp8", storage="simulate")).low_ratio == 0.5
    assert Settings.of(Config(recipe="bf16")).low_ratio == 0.0
    assert Settings.of(Config(recipe="fp8", activation_budget=1)).low_ratio is None
    assert Settings.of(Config(recipe="fp8", plan="plan.json")).low_ratio is None
    assert Settings.of(Config(recipe="fp8", low_ratio=0)).low_ratio == 0.0


def test_compute_high_is_what_real_storage_does_and_no_option_any_more(recwarn):
    config = Config(recipe="fp8", compute="high")
    assert config == Config(recipe="fp8") == Config.from_options({"recipe": "fp8", "compute": "high"})
    assert "compute" not in config.to_dict()
    assert dataclasses.replace(config, seed=1).compute is None
    assert pickle.loads(pickle.dumps(config)) == config
    assert not recwarn.list


def test_compute_stored_of_a_pickle_is_refused_in_words():
    """A config of an earlier version has ``compute`` among its fields."""
    old = Config.__new__(Config)
    with pytest.raises(ConfigError, match=r"^compute='stored' is gone: .*use storage='simulate'.*$"):
        old.__setstate__({**vars(Config(recipe="fp8")), "compute": "stored"})
    old.__setstate__({**vars(Config(recipe="fp8")), "compute": "high"})
    assert old == Config(recipe="fp8")


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"recipe": "fp32"}, False),
        ({"recipe": "bf16"}, True),
        ({"recipe": Recipe(hi="fp32", lo_forward="e4m3fn", lo_backward="e5m2"), "low_ratio": 0.0}, False),
        ({"recipe": Recipe(hi="fp32", lo_forward="e4m3fn", lo_backward="e5m2"), "low_ratio": 0.1}, True),
        ({"recipe": Recipe(hi="fp32", lo_forward="e4m3fn", lo_backward="e5m2"), "activation_budget": 9}, True),
    ],
)
def test_changes_anything_is_false_only_where_all_stays_float32(options, changes):
    assert Settings.of(Config(**options)).changes_anything is changes


@pytest.mark.parametrize(
    ("given_size", "expected"),
    [
        (1, 1),
        (np.int64(7), 7),
        ("12GiB", 12 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("1.5 gib", 3 * 2**29),
        ("100", 100),
        ("3kb", 3000),
        ("0.1GB", 100_000_000),
    ],
)
def test_budget_is_stored_in_bytes(given_size, expected):
    budget = Config(activation_budget=given_size).activation_budget
    assert budget == expected
    assert type(budget) is int


@pytest.mark.parametrize("size", ["", "GiB", "12GiBs", "1e9", "-3MiB", "12 Gi B", "٣GiB", "nan", "1.5.2MB", "0x10"])
def test_what_is_no_size_is_refused_with_examples(size):
    text = message_of(activation_budget=size)
    assert text == (
        f"activation_budget is {size!r}, which is no size; give it a positive number of bytes, as an int or as text "
        "such as '12GiB', '512MiB' or '1.5GB'"
    )


@pytest.mark.parametrize("size", [0, -1, "0GiB", "0.0001B"])
def test_a_budget_must_be_positive(size):
    assert message_of(activation_budget=size).startswith(f"activation_budget is {size!r}, not positive; give it")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"low_ration": 0.6}, ["unknown option 'low_ration'", "did you mean 'low_ratio'?", ALLOWED["low_ratio"]]),
        ({"xyzzy": 1}, ["unknown option 'xyzzy'; the options are recipe, storage, policy, low_ratio"]),
        ({"recipe": "fp9"}, ["unknown recipe 'fp9'; did you mean 'fp8'?", "'hfp8', or a fxprec.Recipe"]),
        ({"recipe": 8}, ["recipe is 8; give it one of 'fp32'"]),
        (
            {"policy": "sise"},
            ["unknown policy 'sise'; did you mean 'size'?", "'exact'", "a function f(tensors, config)"],
        ),
        ({"policy": 3}, ["policy is 3; give it one of 'size'"]),
        ({"compute": "hihg"}, ["unknown compute 'hihg'; did you mean 'high'?", "'high', or None"]),
        ({"compute": "stored"}, ["compute='stored' is gone", "leave compute out, or use storage='simulate'"]),
        (
            {"compute": "high", "storage": "simulate"},
            [
                "compute='high' has operators read values",
                "storage='simulate' has them read rounded ones",
                "leave compute out",
            ],
        ),
        ({"storage": "naitve"}, ["unknown storage 'naitve'; did you mean 'native'?", "'packed', 'simulate'"]),
        ({"lowering": "tritn"}, ["unknown lowering 'tritn'; did you mean 'triton'?", "'eager'"]),
        (
            {"grouping": "datafow"},
            ["unknown grouping 'datafow'; did you mean 'dataflow'?", "allowed: 'execution', 'dat"],
        ),
        ({"low_ratio": 1.01}, ["low_ratio is 1.01, out of range; give it a number from 0 to 1, or None"]),
        ({"low_ratio": -0.1}, ["low_ratio is -0.1, out of range"]),
        ({"low_ratio": float("nan")}, ["low_ratio is NaN; give it a number from 0 to 1"]),
        ({"low_ratio": True}, ["low_ratio is True; give it a number from 0 to 1"]),
        ({"low_ratio": "0.5"}, ["low_ratio is '0.5'; give it a number from 0 to 1"]),
        ({"activation_budget": True}, ["activation_budget is True; give it a positive number of bytes"]),
        ({"activation_budget": 1.5e9}, ["activation_budget is 1500000000.0; give it a positive number of bytes"]),
        ({"promote_above": 0}, ["promote_above is 0, out of range; give it a number above 0 and up to 1, or None"]),
        ({"promote_above": 1.5}, ["promote_above is 1.5, out of range"]),
        ({"promote_above": False}, ["promote_above is False; give it a number above 0"]),
        ({"keep_high": "fc"}, ["keep_high is the text 'fc'; give it a tuple of patterns, ('fc',), or 'ends'"]),
        ({"keep_high": ("fc", 3)}, ["keep_high is ('fc', 3); give it a tuple of module-name patterns, or 'ends'"]),
        ({"keep_high": ("",)}, ["keep_high is ('',)"]),
        (
            {"grad_scaling": "dinamic"},
            ["unknown grad_scaling 'dinamic'; did you mean 'dynamic'?", "or a fxprec.GradScaling"],
        ),
        (
            {"grad_scaling": 65536},
            ["grad_scaling is 65536; give it one of 'auto', 'none', 'fixed', 'dynamic', or a fxprec."],
        ),
        ({"strict": 1}, ["strict is 1; give it True or False"]),
        ({"verify": "yes"}, ["verify is 'yes'; give it True or False"]),
        ({"seed": -1}, ["seed is -1; give it an int of at least 0"]),
        ({"seed": True}, ["seed is True; give it an int of at least 0"]),
        ({"plan": 3}, ["plan is 3; give it the path of a plan file, or None"]),
        ({"dump": ""}, ["dump is ''; give it the path of a folder, or None"]),
        ({"low_ratio": 0.5, "activation_budget": "1GiB"}, ["low_ratio and activation_budget are both given"]),
        ({"low_ratio": 0.5, "plan": "p.json"}, ["low_ratio and plan are both given", "keep one of them"]),
    ],
)
def test_bad_option_names_the_field_the_cause_and_the_way_out(options, words):
    text = message_of(**options)
    for word in words:
        assert word in text


def test_native_storage_of_a_format_without_dtype_names_the_other_two():
    text = message_of(recipe="hfp8", storage="native")
    assert "storage='native' cannot hold recipe 'hfp8': torch has no dtype for 1-6-9" in text
    assert "use storage='packed' (integer codes) or storage='simulate' (float32 carriers)" in text


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (
            {"hi": "bf61", "lo_forward": "e5m2", "lo_backward": "e5m2"},
            ["recipe.hi: ", "'bf61'", "did you mean 'bf16'?"],
        ),
        ({"hi": "bf16", "lo_forward": "1-0-3", "lo_backward": "e5m2"}, ["recipe.lo_forward: ", "exponent_bits"]),
        ({"hi": "bf16", "lo_forward": 8, "lo_backward": "e5m2"}, ["recipe.lo_forward is 8; give it a fxprec.Format"]),
        (
            {"hi": "e5m2", "lo_forward": "bf16", "lo_backward": "e5m2"},
            ["recipe.lo_forward is bf16 (16 bits), wider than hi e5m2 (8 bits); swap them"],
        ),
        ({"hi": "bf16", "lo_forward": "e5m2", "lo_backward": "e5m2", "name": ""}, ["recipe.name is ''"]),
    ],
)
def test_bad_recipe_names_the_role(roles, words):
    with pytest.raises(ConfigError) as caught:
        Recipe(**roles)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"underflow": 0}, "grad_scaling.underflow is 0.0; it must lie between 0 and 1, both excluded"),
        ({"underflow": 1.0}, "grad_scaling.underflow is 1.0; it must lie"),
        ({"underflow": True}, "grad_scaling.underflow is True; give it"),
        ({"interval": 0}, "grad_scaling.interval is 0; give it an int of at least 1"),
        ({"interval": 1.5}, "grad_scaling.interval is 1.5; give it an int"),
        ({"estimate": "histo"}, "unknown grad_scaling.estimate 'histo'; did you mean 'histogram'?"),
    ],
)
def test_bad_grad_scaling_names_the_field(options, words):
    with pytest.raises(ConfigError) as caught:
        GradScaling(**options)
    assert words in str(caught.value)


def test_options_are_exactly_the_fields():
    options = {
        "recipe": "fp8",
        "low_ratio": 0.6,
        "keep_high": ["fc", "head.*"],
        "grad_scaling": GradScaling(interval=7),
    }
    assert Config.from_options(options) == Config(**options)
    assert Config.from_options(None) == Config()
    assert set(ALLOWED) == {f.name for f in dataclasses.fields(Config)}


@pytest.mark.parametrize(("options", "words"), [([("recipe", "fp8")], "give it a dict"), ({3: 1}, "is no text")])
def test_options_that_are_no_mapping_of_names_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Config.from_options(options)


def test_config_is_frozen_and_survives_copies():
    patterns = ["fc"]
    config = Config(recipe="fp8", keep_high=patterns, low_ratio=0.25, plan=None)
    patterns.append("conv1")
    assert config.keep_high == ("fc",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.low_ratio = 0.5  # type: ignore[misc]
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
    assert dataclasses.replace(config, low_ratio=0.5).keep_high == ("fc",)
    assert hash(config) == hash(copy.deepcopy(config))


def pick_first(tensors, config):
    return [0]


def test_to_dict_is_json_and_names_a_policy_function():
    data = Config(recipe="fp8", policy=pick_first, plan=Path("a/plan.json"), grad_scaling=GradScaling()).to_dict()
    again = json.loads(json.dumps(data))
    assert again == data
    assert data["policy"].endswith(":pick_first")
    assert data["plan"] == str(Path("a/plan.json"))
    assert data["recipe"] == {
        "name": "fp8",
        "hi": "bf16",
        "lo_forward": "e4m3fn",
        "lo_backward": "e5m2_sat",
        "weight_grad": "bf16",
    }
    assert data["grad_scaling"] == {"underflow": 1e-3, "interval": 100, "estimate": "statistical"}


@settings(derandomize=True, deadline=None)
@given(st.floats())
def test_a_ratio_is_taken_exactly_when_it_lies_in_range(ratio):
    if 0 <= ratio <= 1:
        assert Config(low_ratio=ratio).low_ratio == ratio
    else:
        with pytest.raises(ConfigError):
            Config(low_ratio=ratio)
