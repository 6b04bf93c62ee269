"""The plan as data: round trips, promotion, comparison. Hostile files are in test_plan_files.py."""

import dataclasses
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxprec.config.recipes import RECIPES
from fxprec.errors import PlanError
from fxprec.numerics import formats
from fxprec.plan import ByteCount, Gemm, Group, KindCounts, Plan, Site
from fxprec.plan.compare import partners

KINDS = ("output", "param", "grad_output", "grad_param")


def site(i: int, kind: str = "output", **changes: object) -> Site:
    values = {
        "id": i,
        "tensor": f"t{i}",
        "kind": kind,
        "module": "layer1.0",
        "shape": "s0 x 8",
        "group": 0,
        "format": "e4m3fn",
        "direction": "backward" if kind.startswith("grad") else "forward",
    }
    return Site(**values | changes)


def group(i: int, elements: int, **changes: object) -> Group:
    values = {
        "id": i,
        "elements": elements,
        "elements_by_kind": KindCounts(output=elements),
        "low": i == 0,
        "order": i,
        "operators": ("relu", "bn1"),
        "size": f"{elements // 4}*s0",
    }
    return Group(**values | changes)


def small_plan(**changes: object) -> Plan:
    gemms = tuple(
        Gemm(id=i, node=node, op="aten.convolution", module=node, group_before=i, group_after=i + 1)
        for i, node in enumerate(("conv1", "conv2"))
    )
    values = {
        "gemms": gemms,
        "groups": tuple(group(i, n) for i, n in enumerate((40, 20, 8))),
        "sites": (site(0), site(1, "param", group=1), site(2, "grad_output"), site(3, group=2, format="bf16")),
        "recipe": RECIPES["fp8"],
        "requested_low_ratio": 0.5,
        "achieved_low_ratio": 40 / 68,
        "bit_ratio": 0.5,
        "total_elements": 68,
        "saved_bytes": ByteCount(fp32=272, planned=96),
    }
    return Plan(**values | changes)


names = st.text(max_size=12)
counts = st.integers(0, 2**40)
formats_used = st.sampled_from(["bf16", "e4m3fn", "e5m2", "fp32", "1-4-3+4", "1-6-9", "1-5-2"])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    parts = draw(st.lists(st.tuples(counts, counts, counts, counts), min_size=1, max_size=4))
    orders = draw(st.permutations(range(len(parts))))
    groups = tuple(
        Group(
            id=i,
            elements=sum(kinds),
            elements_by_kind=KindCounts(**dict(zip(KINDS, kinds, strict=True))),
            low=draw(st.booleans()),
            order=orders[i],
            operators=tuple(draw(st.lists(names, max_size=3))),
            size=draw(names),
            saved_bytes=draw(st.none() | counts),
        )
        for i, kinds in enumerate(parts)
    )
    group_ids = st.integers(0, len(groups) - 1)
    gemms = tuple(
        Gemm(id=i, node=draw(names), op="aten.mm", module=draw(names), group_before=before, group_after=after)
        for i, (before, after) in enumerate(draw(st.lists(st.tuples(group_ids, group_ids), max_size=3)))
    )
    sites = tuple(
        site(i, kind, tensor=draw(names), group=draw(group_ids), format=draw(formats_used))
        for i, kind in enumerate(draw(st.lists(st.sampled_from(KINDS), max_size=5)))
    )
    return Plan(
        gemms=gemms,
        groups=groups,
        sites=sites,
        recipe=RECIPES[draw(st.sampled_from(sorted(RECIPES)))],
        storage=draw(st.sampled_from(["native", "packed", "simulate"])),
        policy=draw(names),
        requested_low_ratio=draw(st.none() | st.floats(0, 1)),
        activation_budget=draw(st.none() | counts),
        achieved_low_ratio=draw(st.floats(0, 1)),
        bit_ratio=draw(st.floats(-2, 2)),
        gap=draw(st.none() | st.floats(0, 1)),
        total_elements=sum(g.elements for g in groups),
        saved_bytes=draw(st.none() | st.builds(ByteCount, fp32=counts, planned=counts)),
    )


@settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_a_saved_plan_loads_as_the_same_plan_and_the_same_bytes(tmp_path_factory, plan):
    path = tmp_path_factory.getbasetemp() / "plan.json"
    plan.save(path)
    first = path.read_bytes()
    loaded = Plan.load(path)
    assert loaded == plan
    loaded.save(path)
    assert path.read_bytes() == first
    assert json.loads(first) == plan.to_dict()
    assert first.endswith(b"}\n")


def test_the_file_has_the_keys_of_the_architecture():
    data = small_plan().to_dict()
    fixed = "schema fxprec torch recipe policy requested_low_ratio achieved_low_ratio total_elements saved_bytes gemms"
    assert set(data) >= {*fixed.split(), "groups", "sites"}
    assert data["schema"] == 1
    assert set(data["saved_bytes"]) == {"fp32", "planned", "fixed"}
    assert set(data["gemms"][0]) >= {"id", "node", "op", "module", "group_before", "group_after"}
    assert set(data["groups"][0]) >= {"id", "elements", "elements_by_kind", "low", "order", "operators"}
    assert set(data["groups"][0]["elements_by_kind"]) == set(KINDS)
    wanted = {"id", "tensor", "kind", "module", "shape", "group", "format", "direction", "promoted_at"}
    assert set(data["sites"][0]) >= wanted
    assert "+" not in data["torch"], "builds of one torch version plan alike"


def test_later_additions_may_be_left_out_of_a_file(tmp_path):
    data = small_plan().to_dict()
    for key in ("storage", "activation_budget", "bit_ratio", "gap"):
        del data[key]
    for row in data["sites"]:
        for key in ("elements", "source"):
            del row[key]
    for row in data["groups"]:
        del row["size"], row["saved_bytes"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    assert Plan.load(path).formats == small_plan().formats


def test_saving_replaces_the_file_whole_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(path)
    small_plan().save(link)
    assert link.is_symlink()
    assert Plan.load(link) == Plan.load(path) == small_plan()
    assert sorted(os.listdir(tmp_path)) == ["link.json", "plan.json"]


def test_a_plan_that_cannot_be_written_leaves_the_old_file(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(PlanError, match=r"folder: cannot write the plan: .*; choose a writable file path"):
        small_plan().save(folder)
    with pytest.raises(PlanError, match=r"missing/plan.json: cannot write the plan: No such file or directory"):
        small_plan().save(tmp_path / "missing" / "plan.json")
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(folder) == []


def test_lookups():
    plan = small_plan()
    assert plan.format(1) == plan.format(plan.sites[1]) == formats.E4M3FN
    assert plan.format(3) == formats.BF16
    assert plan.formats["t2", "grad_output"] == "e4m3fn"
    assert plan.low_groups == {0}


def test_promotion_changes_one_row_and_nothing_else():
    plan = small_plan()
    after = plan.promote([1], step=7)
    assert after.sites[1] == dataclasses.replace(plan.sites[1], format="bf16", promoted_at=7)
    assert [s for s in after.sites if s.id != 1] == [s for s in plan.sites if s.id != 1]
    assert dataclasses.replace(after, sites=plan.sites) == plan
    assert plan.sites[1].promoted_at is None, "plans are immutable"
    assert after.promoted == (after.sites[1],)


def test_promotion_is_permanent_and_idempotent():
    once = small_plan().promote([0], step=3, hi="fp16")
    assert once.sites[0].format == "fp16"
    assert once.promote([0], step=9, hi="fp32") is once
    assert small_plan().promote([3], step=9).sites[3].promoted_at is None, "already high"
    again = small_plan()
    assert again.promote([], step=1) is again


@pytest.mark.parametrize(
    ("i", "words"),
    [
        (2, r"site 2 \(t2, grad_output\) cannot be promoted: gradients keep their format; tune grad_scaling"),
        (4, "site 4 cannot be promoted: the plan has sites 0 to 3"),
        (-1, "site -1 cannot be promoted"),
    ],
)
def test_what_cannot_be_promoted_is_refused(i, words):
    with pytest.raises(PlanError, match=words):
        small_plan().promote([i], step=1)


def changed(plan: Plan, table: str, i: int, **values: object) -> Plan:
    rows = list(getattr(plan, table))
    rows[i] = dataclasses.replace(rows[i], **values)
    return dataclasses.replace(plan, **{table: tuple(rows)})


@pytest.mark.parametrize(
    ("table", "i", "values", "message"),
    [
        ("gemms", 1, {"node": "layer1.conv"}, "gemm 1 is 'conv2' here but 'layer1.conv' in plan.json"),
        ("gemms", 0, {"op": "aten.mm"}, "gemm 0 (conv1) op is 'aten.convolution' here but 'aten.mm' in plan.json"),
        ("groups", 2, {"operators": ()}, "group 2 is relu, bn1 here but empty in plan.json"),
        ("groups", 1, {"elements": 21}, "group 1 elements is 20 here but 21 in plan.json"),
        ("sites", 3, {"tensor": "gelu"}, "site 3 is 't3' here but 'gelu' in plan.json"),
        ("sites", 0, {"shape": "s0 x 9"}, "site 0 (t0) shape is 's0 x 8' here but 's0 x 9' in plan.json"),
    ],
)
def test_the_first_difference_of_two_models_is_named(table, i, values, message):
    plan = small_plan()
    assert plan.first_difference(changed(plan, table, i, **values), there="plan.json") == message


def test_a_missing_entry_is_named():
    plan = small_plan()
    shorter = dataclasses.replace(plan, gemms=plan.gemms[:1])
    message = "2 gemms here but 1 in plan.json; the first without a partner is 'conv2'"
    assert plan.first_difference(shorter, there="plan.json") == message
    assert (
        shorter.first_difference(plan) == "1 gemms here but 2 in the other plan; the first without a partner is 'conv2'"
    )


def test_another_choice_for_the_same_model_is_no_difference():
    plan = small_plan()
    other = changed(plan.promote([0], step=1), "groups", 0, low=False, order=9)
    other = dataclasses.replace(other, policy="exact", requested_low_ratio=None, recipe=RECIPES["hfp8"])
    assert plan.first_difference(other) is None


def test_another_batch_size_is_a_difference_only_in_sizes():
    plan = small_plan()
    other = changed(changed(plan, "groups", 1, elements=999, size="s7"), "sites", 0, shape="16 x 8")
    assert plan.first_difference(other) is not None
    assert plan.first_difference(other, sizes=False) is None


def test_node_numbers_are_no_part_of_the_model():
    """FX counts symbolic arithmetic too, so a second trace under dynamic shapes numbers its nodes otherwise."""
    names, renamed = (("mul_98", "mul_102", "conv1.weight_1"), ("mul_97", "mul_101", "conv1.weight_1"))
    kinds = ("output", "output", "param")
    plan, again = (
        small_plan(sites=tuple(site(i, kind, tensor=t) for i, (t, kind) in enumerate(zip(tensors, kinds, strict=True))))
        for tensors in (names, renamed)
    )
    assert plan.first_difference(again) is None
    other = dataclasses.replace(again, sites=(*again.sites[:2], site(2, "param", tensor="conv1.weight_2")))
    words = "site 2 is 'conv1.weight_1' here but 'conv1.weight_2' in the other plan"
    assert plan.first_difference(other) == words


def test_partners_in_two_graphs_of_one_model_are_matched_by_place_and_order():
    def plan(*tensors: str) -> Plan:
        return small_plan(sites=tuple(site(i, tensor=t) for i, t in enumerate(tensors)))

    assert partners(plan("mul_3", "add_1", "mul_5"), plan("mul_4", "mul_6", "add_7")) == {0: 0, 1: 2, 2: 1}
    # One of the training graph's is only saved for backward: names tell, where they did not move.
    assert partners(plan("mul_5"), plan("mul_3", "mul_5")) == {0: 1}
    assert partners(plan("mul_4"), plan("mul_3", "mul_5")) == {}
