"""Config and recipes. Their errors are in test_bad_inputs.py."""

import copy
import dataclasses
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxprec
from fxprec.config import ALLOWED, Config, Settings
from fxprec.config.grad_scaling import GradScaling
from fxprec.config.recipes import RECIPES, Recipe, find_recipe
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage": "simulate"}, "and storage='simulate' gives them rounded ones; leave storage out, or leave"),
        ({"recipe": "hfp8"}, ", the default where torch has no dtype for 1-6-9, .*; give storage='packed', or leave"),
        ({"recipe": "hfp8", "storage": "simulate"}, "gives them rounded ones; choose storage='packed', or leave"),
        ({"accumulator": "1-6-9"}, "storage='simulate', which accumulator needs, gives .*; leave accumulator out, or"),
    ],
)
@pytest.mark.parametrize("budget", ["peak_budget", "step_budget"])
def test_a_budget_is_refused_where_the_storage_in_force_stores_no_copies(budget, options, words):
    """Without ``storage=`` a peak budget was accepted, and no plan was bound by it."""

    def made():
        if budget == "peak_budget":
            return Config(**options, peak_budget="60%")
        optimizer = fxprec.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        return fxprec.Backend(Config(**options), optimizer=optimizer, step_budget="1MiB")

    with pytest.raises(ConfigError, match=f"^{budget} bounds what a step holds .*{words} .*{budget} out$"):
        made()


def test_a_block_format_is_refused_beside_an_accumulator():
    words = "storage='simulate' stores no copies"
    with pytest.raises(ConfigError, match=words):
        Config(recipe="fp8+int4", accumulator="1-6-9")


def test_the_default_ratio_applies_only_where_something_can_be_low():
    assert Settings.of(Config(recipe="fp8")).low_ratio == 1
    assert Settings.of(Config(recipe="fp8", storage="simulate")).low_ratio == 0.5
    assert Settings.of(Config(recipe="bf16")).low_ratio == 0.0
    assert Settings.of(Config(recipe="fp8", activation_budget=1)).low_ratio is None
    assert Settings.of(Config(recipe="fp8", plan="plan.json")).low_ratio is None
    assert Settings.of(Config(recipe="fp8", low_ratio=0)).low_ratio == 0.0


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
def test_rounds_anything_is_false_only_where_all_stays_float32(options, changes):
    assert Settings.of(Config(**options)).rounds_anything is changes


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


@pytest.mark.parametrize(
    "size", ["", "GiB", "12GiBs", "1e9", "-3MiB", "12 Gi B", "٣GiB", "nan", "1.5.2MB", "0x10", "150%"]
)
def test_what_is_no_size_is_refused_with_examples(size):
    text = message_of(activation_budget=size)
    assert text == (
        f"activation_budget is {size!r}, which is not a size; give it a positive number of bytes, as an int or as text "
        "such as '12GiB', '512MiB' or '1.5GB'"
    )


def test_a_share_is_named_as_the_number_or_the_option_that_it_is():
    assert message_of(activation_budget="50%").endswith(
        "or '1.5GB'; a share of the elements is low_ratio=0.5, one of the peak peak_budget='50%'"
    )
    assert message_of(low_ratio="50%") == "low_ratio is '50%'; give it 0.5, a number from 0 to 1, or None"
    assert message_of(low_ratio="150%") == "low_ratio is '150%'; give it a number from 0 to 1, or None"


def test_the_recipes_that_are_named_are_allowed():
    named = re.findall(r"'(.+?)'", ALLOWED["recipe"])
    assert {*RECIPES, "fp8+int4"} < set(named)
    assert [find_recipe(name).name for name in named] == named


@pytest.mark.parametrize("size", [0, -1, "0GiB", "0.0001B"])
def test_a_budget_must_be_positive(size):
    assert message_of(activation_budget=size).startswith(f"activation_budget is {size!r}, not positive; give it")


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


def test_a_seed_that_shuffles_nothing_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^seed=3 shuffles the groups of policy='random', and policy is 'size'; give pol"
    ):
        fxprec.Config(seed=3)
    assert fxprec.Config(seed=3, policy="random").seed == 3
    assert fxprec.Config(seed=3, policy=lambda problem: None).seed == 3, "a policy of one's own may read it"  # type: ignore[arg-type,return-value]
