"""Assignment against a plain reading of docs/algorithms.md, "Demotion and promotion", in exact arithmetic."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from counted_tensors import groups_of, mlp, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from in_force import in_force

from fxprec.config import config as config_module
from fxprec.numerics.formats import parse
from fxprec.passes.analysis.assignment import assign, elements_needed
from fxprec.passes.analysis.policies import POLICIES
from fxprec.passes.analysis.saved_bytes import bytes_per_element
from fxprec.passes.notice import readable


def low_groups(sizes: list[int], **options: object) -> set[int]:
    return set(assign(groups_of(sizes), in_force(recipe="fp8", **options)).low_groups)


def the_papers_demotion(sizes: list[int], ratio: Fraction) -> set[int]:
    """The definition, word for word."""
    total = sum(sizes)
    reached, low = 0, set()
    for group in sorted(range(len(sizes)), key=lambda g: (-sizes[g], g)):
        if Fraction(reached, total) >= ratio:
            break
        low.add(group)
        reached += sizes[group]
    return low


sizes_of_groups = st.lists(st.integers(1, 10**10), min_size=1, max_size=12)


@settings(derandomize=True, deadline=None)
@given(sizes_of_groups, st.integers(0, 10), st.booleans())
def test_size_demotes_as_the_paper_in_steps_of_a_tenth(sizes, tenths, by_product):
    ratio = tenths * 0.1 if by_product else tenths / 10  # 3 * 0.1 is 0.30000000000000004
    assert low_groups(sizes, low_ratio=min(ratio, 1.0)) == the_papers_demotion(sizes, Fraction(tenths, 10))


def test_a_ratio_met_exactly_demotes_no_further_group():
    assert low_groups([1] * 10, low_ratio=3 * 0.1) == {0, 1, 2}
    assert low_groups([1] * 10, low_ratio=np.nextafter(0.3, 1) + 1e-12) == {0, 1, 2, 3}
    assert low_groups([4] * 3, low_ratio=1 / 3) == {0}
    assert low_groups([10**10, 10**10, 1], low_ratio=0.5) == {0, 1}, "half needs one element more than group 0"


def test_ties_go_to_the_lower_id_and_the_order_is_recorded_for_every_group():
    result = assign(groups_of([8, 40, 8, 16]), in_force(recipe="fp8", low_ratio=0.75))
    assert result.order == {1: 0, 3: 1, 0: 2, 2: 3}
    assert result.low_groups == {1, 3}
    assert result.low == {t.id for t in groups_of([8, 40, 8, 16]) if t.group in (1, 3)}


def test_ratio_zero_is_nothing_and_one_is_everything():
    for policy in POLICIES:
        options = {"recipe": "fp8", "policy": policy}
        none = assign(mlp(), in_force(**options, low_ratio=0), damage={})
        assert none.low == none.low_groups == frozenset()
        assert none.achieved_ratio == none.bit_ratio == 0.0
    everything = assign(mlp(), in_force(recipe="fp8", low_ratio=1))
    assert everything.low == set(range(11))
    assert everything.achieved_ratio == 1.0


def test_other_orders():
    sizes = [8, 40, 8, 16]
    assert low_groups(sizes, policy="size-ascending", low_ratio=0.2) == {0, 2}
    assert low_groups(sizes, policy="uniform") == {0, 1, 2, 3}
    orders = {
        tuple(sorted(found, key=found.get))
        for seed in range(20)
        for found in [dict(assign(groups_of(sizes), in_force(recipe="fp8", policy="random", seed=seed)).order)]
    }
    assert len(orders) > 5, "seeds differ"
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    again = in_force(recipe="fp8", policy="random", seed=3)
    assert assign(groups_of(sizes), again) == assign(groups_of(sizes), again)


def test_operator_policies_choose_by_role():
    operands = {0, 1, 4, 5, 7, 10}  # inputs, weights and incoming gradients of both linears
    results = {3, 6, 9}  # what the linears make, forward and backward
    assert assign(mlp(), in_force(recipe="fp8", policy="operator")).low == operands
    assert assign(mlp(), in_force(recipe="fp8", policy="operator-io")).low == operands | results
    held = assign(mlp(), in_force(recipe="fp8", policy="operator", keep_high="ends"))
    assert held.low == {5, 7}, "the first GEMM and the last group are high"
    held = assign(mlp(), in_force(recipe="fp8", policy="operator-io", keep_high="ends"))
    assert held.low == {5, 6, 7}


def test_ratios_count_what_the_definitions_say():
    tensors = mlp()
    result = assign(tensors, in_force(recipe="fp8", low_ratio=0.5))
    assert result.low_groups == {1}
    total, low = sum(t.elements for t in tensors), sum(t.elements for t in tensors if t.group == 1)
    assert result.achieved_ratio == low / total
    spared = 8 * sum(t.elements for t in tensors if t.group == 1 and t.kind != "grad_param")
    assert result.bit_ratio == pytest.approx(2 * spared / (16 * total), abs=1e-15)
    assert result.bit_ratio < result.achieved_ratio, "weight gradients stay high"


def test_bit_ratio_of_a_16_to_8_recipe_without_weight_gradients_is_the_element_ratio():
    tensors = [tensor(i, kind, i, 100) for i, kind in enumerate(("output", "grad_output", "param"))]
    for recipe in ("fp8", "hfp8"):
        result = assign(tensors, in_force(recipe=recipe, low_ratio=0.6))
        assert result.bit_ratio == result.achieved_ratio == pytest.approx(2 / 3)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(sizes_of_groups, st.floats(0, 1), st.floats(0, 1), st.sampled_from(["size", "size-ascending", "random"]))
def test_a_larger_ratio_only_adds_groups(sizes, a, b, policy):
    less, more = (assign(groups_of(sizes), in_force(recipe="fp8", policy=policy, low_ratio=r)) for r in sorted((a, b)))
    assert less.low <= more.low
    assert less.order == more.order
    assert more.achieved_ratio >= max(a, b) * (1 - 1e-12)


@settings(derandomize=True, deadline=None)
@given(st.floats(0, 1), st.integers(0, 10**12))
def test_elements_needed_is_the_smallest_sufficient_count(ratio, total):
    need = elements_needed(ratio, total)
    slack = Fraction(ratio) * total / 2**50
    assert 0 <= need <= total
    assert need >= Fraction(ratio) * total - slack
    assert need - 1 < Fraction(ratio) * total
    assert (need > 0) == (ratio > 0 and total > 0)


def test_a_recipe_without_a_low_format_demotes_nothing_and_still_records_the_order():
    result = assign(mlp(), in_force(recipe="bf16", policy="uniform"))
    assert result.low == frozenset()
    assert set(result.order) == {0, 1, 2}
    assert result.warnings == ()
    (warning,) = assign(mlp(), in_force(recipe="bf16", low_ratio=0.6)).warnings
    assert warning == (
        "low_ratio 0.6 is not reached (0): recipe 'bf16' has no low format; choose 'fp8', or leave low_ratio out"
    )


def test_keep_high_holds_modules_and_their_submodules():
    tensors = groups_of([8, 8, 8])
    tensors = [dataclasses.replace(t, module=("stem", "layer1.0.conv", "layer10")[t.group]) for t in tensors]
    for patterns, groups in [(("layer1",), {0, 2}), (("layer1.*",), {0, 2}), (("layer*",), {0}), (("*.conv",), {0, 2})]:
        result = assign(tensors, in_force(recipe="fp8", policy="uniform", keep_high=patterns))
        assert result.low_groups == groups
        assert result.warnings == ()


def test_a_dot_is_what_no_submodule_made_and_no_other_pattern_reaches_it():
    tensors = [dataclasses.replace(t, module=("", "layer1", "x")[t.group]) for t in groups_of([8, 8, 8])]
    for patterns, groups in [((".",), {1, 2}), (("*",), {0}), ((".", "x"), {1})]:
        result = assign(tensors, in_force(recipe="fp8", policy="uniform", keep_high=patterns))
        assert result.low_groups == groups
        assert result.warnings == ()


def test_a_pattern_that_matches_nothing_is_a_warning():
    (warning,) = assign(mlp(), in_force(recipe="fp8", keep_high=("fc3",))).warnings
    assert warning == "keep_high pattern 'fc3' matches no module; did you mean 'fc2'?; modules are fc1, fc2, relu"
    many = [dataclasses.replace(t, module=f"m{t.id:02}") for t in groups_of([4] * 5)]
    (warning,) = assign(many, in_force(recipe="fp8", keep_high=("zzz",))).warnings
    assert warning.endswith("modules are m00, m01, m02, m03, m04, m05, m06, m07 and 12 more")
    bare = [dataclasses.replace(t, module="") for t in mlp()]
    (warning,) = assign(bare, in_force(recipe="fp8", keep_high=("fc",))).warnings
    assert "the graph names no modules" in warning


def test_a_ratio_that_keep_high_or_the_policy_prevents_is_a_warning():
    result = assign(mlp(), in_force(recipe="fp8", low_ratio=1, keep_high=("fc2",)))
    total, held = sum(t.elements for t in mlp()), 48 + 48 + 30 + 30
    assert result.achieved_ratio == (total - held) / total
    assert result.warnings == (
        f"low_ratio 1 is not reached ({(total - held) / total:.4g}): keep_high holds {held} of {total} elements; "
        "keep less high, or ask for less",
    )
    (warning,) = assign(mlp(), in_force(recipe="fp8", policy="operator", low_ratio=0.9)).warnings
    assert "policy 'operator' decides by itself; choose 'size', or leave low_ratio out" in warning
    assert assign(mlp(), in_force(recipe="fp8", policy="operator")).warnings == (), "the default ratio asks for nothing"


def test_ends_holds_the_first_gemm_and_the_last_group():
    result = assign(mlp(), in_force(recipe="fp8", policy="uniform", keep_high="ends"))
    assert result.low == {5, 6, 7, 8}
    assert result.low_groups == {1}
    second_branch = tensor(11, "param", 0, 64, module="shortcut", of_gemm=True, feeds_gemm=True)
    result = assign([*mlp(), second_branch], in_force(recipe="fp8", policy="uniform", keep_high="ends"))
    assert 11 in result.low, "another GEMM that reads group 0 is not the first"


@pytest.mark.parametrize(("name", "size"), [("e4m3fn", 1), ("1-4-3+4", 1), ("bf16", 2), ("1-6-9", 2), ("fp32", 4)])
def test_a_stored_element_takes_whole_bytes(name, size):
    assert bytes_per_element(parse(name)) == size


def test_sizes_are_readable():
    assert [readable(n) for n in (0, 1023, 1024, 3 * 2**29)] == [
        "0 bytes",
        "1023 bytes",
        "1.00 KiB (1024 bytes)",
        "1.50 GiB (1610612736 bytes)",
    ]


def test_every_policy_of_the_config_exists_and_no_other():
    assert set(POLICIES) == set(config_module.POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_without_tensors_or_elements_is_no_error(policy):
    empty = assign([], in_force(recipe="fp8", policy=policy, low_ratio=0.5), damage={})
    assert (empty.low, empty.achieved_ratio, empty.bit_ratio) == (frozenset(), 0.0, 0.0)
    nothing = assign([tensor(0, "output", 0, 0)], in_force(recipe="fp8", policy=policy, low_ratio=0.5), damage={})
    assert nothing.achieved_ratio == 0.0
    assert nothing.warnings == ()
