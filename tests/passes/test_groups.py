"""Groups, sizes and demotion of the paper's four networks, against counts made without the passes."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
import sympy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from union_find import Classes

sys.path.insert(0, str(Path(__file__).parents[1]))

import cifar
from cifar import GEMMS
from in_force import in_force

from fxprec.passes.analysis.assignment import assign

RATIOS = [i / 10 for i in range(11)]
GOLDEN = Path(__file__).parents[1] / "golden"
IN_FULL = (cifar.mobilenet_v2,)  # 13 s to plan: depthwise convolutions as ShuffleNet's, residuals as ResNet's
NETWORKS = pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=pytest.mark.full if make in IN_FULL else ()) for make in GEMMS],
    ids=lambda make: make.__name__,
)

REGIONS = {cifar.squeezenet: 15, cifar.shufflenet_v2: 42, cifar.mobilenet_v2: 45, cifar.resnet18: 14}

planned = cache(cifar.plan)


@NETWORKS
def test_groups_are_gemms_plus_one(make):
    plan = planned(make).plan
    assert len(plan.gemms) == GEMMS[make]
    assert len(plan.groups) == GEMMS[make] + 1
    assert [(g.group_before, g.group_after) for g in plan.gemms] == [(i, i + 1) for i in range(GEMMS[make])]


@NETWORKS
def test_elements_match_a_count_of_the_functions_the_model_calls(make):
    plan, wanted = planned(make).plan, cifar.count(make)
    for group in plan.groups:
        assert {k: n for k, n in vars(group.elements_by_kind).items() if n} == dict(wanted[group.id]), group.id
    assert plan.total_elements == sum(sum(kinds.values()) for kinds in wanted.values())


def the_papers_demotion(sizes: dict[int, int], ratio: Fraction) -> tuple[list[int], set[int]]:
    order = sorted(sizes, key=lambda g: (-sizes[g], g))
    low: set[int] = set()
    for group in order:
        if Fraction(sum(sizes[g] for g in low), sum(sizes.values())) >= ratio:
            break
        low.add(group)
    return order, low


@NETWORKS
@pytest.mark.parametrize("tenths", range(11))
def test_demotion_order_ties_and_reached_ratio(make, tenths):
    sizes = {g: sum(kinds.values()) for g, kinds in cifar.count(make).items()}
    order, low = the_papers_demotion(sizes, Fraction(tenths, 10))
    got = assign(planned(make).tensors, in_force(recipe="hfp8", low_ratio=tenths / 10))
    assert sorted(got.order, key=got.order.__getitem__) == order
    assert got.low_groups == low
    assert got.achieved_ratio == sum(sizes[g] for g in low) / sum(sizes.values())


def test_ties_exist_so_that_their_order_is_tested():
    sizes = [g.elements for g in planned(cifar.resnet18).plan.groups]
    assert len(set(sizes)) < len(sizes)


def summary(make) -> dict:
    """What the golden file holds: all but FX node names, which belong to a torch version."""
    plan, tensors = planned(make).plan, planned(make).tensors
    sweep = {r: assign(tensors, in_force(recipe="hfp8", low_ratio=r)) for r in RATIOS}
    return {
        "total_elements": plan.total_elements,
        "gemms": [[g.op, g.module] for g in plan.gemms],
        "groups": [[g.order, *vars(g.elements_by_kind).values()] for g in plan.groups],
        "sites": [[s.kind, s.module, s.shape, s.group, s.format] for s in plan.sites],
        "low_ratio": {
            str(r): {"achieved": a.achieved_ratio, "bits": a.bit_ratio, "low_groups": sorted(a.low_groups)}
            for r, a in sweep.items()
        },
    }


@NETWORKS
def test_plan_equals_the_golden_file(make):
    """Run with FXPREC_REGENERATE=1 to accept a change."""
    text = json.dumps(summary(make), separators=(",", ":")).replace("],", "],\n").replace("},", "},\n") + "\n"
    path = GOLDEN / f"{make.__name__}.json"
    if os.environ.get("FXPREC_REGENERATE") == "1" or not path.exists():
        existed = path.exists()
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        assert existed, f"{path.name} was missing and is written now: look at it, then run again"
    assert text == path.read_text(encoding="utf-8")


class Regions(TorchFunctionMode):
    """Puts the tensors a model makes into classes, from the torch functions it calls."""

    def __init__(self, images: torch.Tensor) -> None:
        super().__init__()
        self.classes, self.name, self.keep = Classes(), {id(images): images}, [images]
        self.classes.add(id(images))

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        flat = [t for a in args for t in (a if isinstance(a, list | tuple) else [a]) if isinstance(t, torch.Tensor)]
        for r in result if isinstance(result, tuple | list) else [result]:
            if isinstance(r, torch.Tensor) and r.is_floating_point():
                self.keep.append(r)
                is_gemm = function.__name__ in cifar.CALLS_A_GEMM
                self.classes.add(id(r), *(() if is_gemm else (id(t) for t in flat if id(t) in self.classes.parent)))
        return result


@NETWORKS
def test_regions_are_those_of_the_functions_the_model_calls(make):
    with torch.device("meta"):
        model: nn.Module = make()
        images = torch.empty(cifar.BATCH, 3, 32, 32)
    with Regions(images) as counting:
        model(images)
    assert len(counting.classes) == REGIONS[make]
    regions = planned(make).regions
    sizes = Counter(dict.fromkeys(range(regions.grouping.num_groups), 0))
    for tensor in regions.tensors:
        sizes[tensor.group] += tensor.elements
    assert (len(sizes), len(regions.gemms)) == (REGIONS[make], GEMMS[make])
    assert all(sizes.values()), "no empty group"
    assert sizes.total() == sum(sum(kinds.values()) for kinds in cifar.count(make).values())


def test_one_plan_serves_every_batch_size_and_a_second_compile_gives_the_same_bytes(tmp_path):
    first, second = (cifar.plan(cifar.short_resnet, dynamic=True).plan for _ in range(2))
    first.save(tmp_path / "first.json")
    second.save(tmp_path / "second.json")
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()
    for dynamic, static in zip(first.groups, planned(cifar.short_resnet).plan.groups, strict=True):
        size = sympy.sympify(dynamic.size)
        (batch,) = size.free_symbols
        assert size.subs(batch, cifar.BATCH) == static.elements == dynamic.elements
        assert sympy.degree(size, batch) == 1
