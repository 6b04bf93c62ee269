"""What explain, the page and the texts say of a plan: who reads a stored copy, and why there is none."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxprec import Plan
from fxprec.plan.edits import as_edited
from fxprec.plan.explain import explain
from fxprec.plan.rows import PeakBytes
from fxprec.plan.saved_tensors import data
from fxprec.plan.shown import line
from fxprec.report.compare import differences
from tests.helpers import compiled, eager_backend


class Model(nn.Module):
    """A norm, attention, an angle, a checkpointed block, a tanh: each answer at least once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.deep, self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        h = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        h = checkpoint(self.deep, torch.cos(h), use_reentrant=False)
        return self.head(torch.tanh(F.gelu(h)))


X = torch.randn(2, 16, 16)


def trained(**options) -> Plan:
    torch.manual_seed(0)
    backend = eager_backend("fp8", **{"low_ratio": 1.0, **options})
    compiled(Model(), backend)(X).sum().backward()
    return backend.plans[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("explained")


@pytest.fixture(scope="module")
def plan(place) -> Plan:
    return trained(dump=place)


@pytest.fixture(scope="module")
def dropped() -> Plan:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
    backend = eager_backend("fp8", low_ratio=1.0)
    compiled(model, backend)(X[0]).sum().backward()
    return backend.plans[0]


def said(plan: Plan, tensor: str, kind: str = "output") -> list[str]:
    lines = explain(plan, tensor)
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{tensor} ({kind}"))
    return [line.strip() for line in lines[start : start + 4]]


READ_BY_BACKWARD = "backward reads the stored copy; forward, and what leaves the graph, is the value itself"
READ_BY_GEMMS_TOO = "backward reads the stored copy, and so does any forward GEMM, which multiplies that format anyway"
ONE_VALUE = "every reader gets this one value: there is no second copy"
UNREAD = "bf16 and not e4m3fn, since nobody would read a low copy: "
LINES = {
    ("x", "output"): ("recipe 'fp8' holds a low output in e4m3fn", READ_BY_BACKWARD),
    ("add_1", "output"): (UNREAD + "it is recomputed in backward from the stored copy of its input", ONE_VALUE),
    ("qkv.weight", "param"): (
        UNREAD + "no GEMM multiplies its codes, and backward reads the parameter itself",
        ONE_VALUE,
    ),
    ("addmm", "output"): (
        "bf16 and not e4m3fn, since backward exponentiates it: an error of 0.5 in the exponent is a factor of 1.6",
        READ_BY_GEMMS_TOO,
    ),
    ("addmm_1", "output"): (
        "bf16 and not e4m3fn, since an angle's error counts in radians, and from 16 to 32 e4m3fn rounds by up to 1 "
        "(aten.cos)",
        READ_BY_GEMMS_TOO,
    ),
    ("addmm_2", "output"): (UNREAD + "checkpointing recomputes it in backward", ONE_VALUE),
    ("addmm_3", "output"): (
        "bf16 and not e4m3fn, since it is the boundary of a checkpointed region: forward and its recomputation read "
        "the one value that is saved",
        ONE_VALUE,
    ),
    ("addmm_4", "output"): (UNREAD + "backward does not read it, and no GEMM multiplies its codes", ONE_VALUE),
    ("addmm_4", "grad_output"): (
        UNREAD.replace("e4m3fn", "e5m2_sat") + "no GEMM multiplies the codes of this gradient",
        ONE_VALUE,
    ),
}


@pytest.mark.parametrize(("tensor", "kind"), LINES)
def test_explain_says_why_a_tensor_of_a_low_group_is_high_and_who_reads_it(plan, tensor, kind):
    head, group, *rest = said(plan, tensor, kind)
    assert head.endswith(": e4m3fn" if tensor == "x" else ": bf16")
    assert " is low: " in group
    assert tuple(rest) == LINES[tensor, kind]


def test_of_the_whole_plan_each_tensor_held_for_backward_is_told_and_then_each_group(plan):
    first, title, head, *more = explain(plan, "")
    assert first == line([plan])
    assert title.startswith("held for backward, largest first")
    assert head.split() == ["bytes", "in", "bf16", "in", "float32", "format", "tensor", "module", "source"]
    rows = more[: len(plan.saved)]
    assert (
        any(re.search(r"2,048 +4,096 +8,192 +bf16 +addmm_3 +deep\.2 +test_explain\.py:\d+$", r) for r in rows) or rows
    )
    held, in_bf16, in_float32, *_ = more[len(plan.saved)].split()
    count = plan.saved_bytes
    assert (held, in_bf16, in_float32) == tuple(f"{n:,}" for n in (count.planned, count.bf16, count.fp32))
    groups = more[len(plan.saved) + 2 : -1]
    assert [f"group {g.id}, asked {'low' if g.low else 'high'}" for g in plan.groups] == [
        g.partition(":")[0].strip() for g in groups
    ]
    assert "peak_budget" in more[-1]
    assert plan.explain() == "\n".join(explain(plan, ""))


def test_the_rows_add_up_to_what_the_plan_its_groups_and_its_line_count(plan):
    told = data(plan)
    saved, count = told["saved"], plan.saved_bytes
    assert told["total"] == {"planned": count.planned, "bf16": count.bf16, "fp32": count.fp32}
    for name, total in (("bytes", count.planned), ("bf16", count.bf16), ("fp32", count.fp32)):
        assert sum(row[name] for row in saved) == total
    for group, asked in zip(plan.groups, told["groups"], strict=True):
        members = [row for row in saved if row["group"] == group.id]
        assert group.saved_bytes == asked["bytes"] == sum(row["bytes"] for row in members)
        assert sum(asked["formats"].values()) == len(members)
    in_8 = sum(row["format"] == "e4m3fn" for row in saved)
    assert f"; {in_8} tensors in 8 bits, " in line([plan])
    for row in saved:
        site = None if row["site"] is None else plan.sites[row["site"]]
        assert site is None or (row["tensor"], row["module"], row["format"]) == (site.tensor, site.module, site.format)


def test_a_tensor_of_a_low_group_that_is_held_in_bf16_is_told_as_bf16(plan):
    row = next(row for row in plan.saved if row.tensor == "addmm")
    assert plan.groups[row.group].low
    assert (row.format, row.module, row.bytes) == ("bf16", "qkv", 2 * row.elements)
    (told,) = (line for line in explain(plan, "") if line.split()[4:5] == ["addmm"])
    assert "  bf16 " in told


def test_the_low_share_is_of_bytes_saved_and_not_of_what_the_policy_chose(plan):
    assert plan.achieved_low_ratio == 1
    low = sum(row.bytes for row in plan.saved if row.format == "e4m3fn")
    assert plan.saved_low_share == low / plan.saved_bytes.planned < 0.5


def test_masks_take_what_they_take_in_every_format(dropped):
    masks = [row for row in dropped.saved if row.format == "bool"]
    assert {(mask.bytes, mask.bf16, mask.fp32, mask.elements) for mask in masks} == {(512, 512, 512, 0)}
    count, fixed = dropped.saved_bytes, 512 * len(masks)
    floats = sum(row.elements for row in dropped.saved if row.fp32)
    assert (count.fp32, count.bf16, count.fixed) == (4 * floats + fixed, 2 * floats + fixed, fixed)
    assert line([dropped]).endswith(", 2 masks"), "of the dropout and of the ReLU"


def test_what_no_format_changes_is_counted_by_what_it_is(dropped):
    mask = next(row for row in dropped.saved if row.format == "bool")
    others = [replace(mask, format=dtype) for dtype in ("int64", "int8", "complex64")]
    assert line([replace(dropped, saved=(mask, *others))]).endswith("; 1 complex tensor, 2 integer tensors, 1 mask")


def test_a_module_is_explained_with_all_that_is_inside_it(plan):
    inside = [site.tensor for site in plan.sites if site.module.startswith("deep.")]
    assert inside
    assert [line.split(" ")[0] for line in explain(plan, "deep") if not line.startswith("  ")] == inside


def test_a_tensor_that_is_saved_without_a_site_is_explained(plan):
    names = {site.tensor for site in plan.sites}
    row = next(row for row in plan.saved if row.tensor not in names)
    (said,) = explain(plan, row.tensor)
    assert said.startswith(f"{row.tensor} (")
    assert f": {row.bytes:,} bytes in {row.format}, saved unchanged, since no pass may round it: " in said


def test_a_plan_that_lists_no_tensors_says_so(plan):
    older = replace(plan, saved=())
    assert "does not list its tensors" in explain(older, "")[1]
    assert "no backward half" in explain(replace(older, saved_bytes=None), "")[1]
    assert Plan.from_dict(plan.to_dict()).saved == plan.saved


def test_a_large_plan_shows_the_largest_and_adds_up_the_others(plan):
    many = replace(plan, saved=tuple(replace(plan.saved[0], bytes=i) for i in range(1, 51)))
    lines = explain(many, "")
    assert lines[3].split()[0] == "50"
    assert re.match(r"\s+55 .* 10 smaller ones; --json has all", lines[43])
    assert lines[44].split()[0] == f"{sum(range(51)):,}"


def test_in_a_simulation_there_is_no_copy_to_say_the_readers_of():
    simulated = trained(storage="simulate", low_ratio=1.0)
    assert said(simulated, "addmm_1")[2:] == ["recipe 'fp8' holds a low output in e4m3fn"]
    assert not [s for s in simulated.sites if s.why]


def test_codes_that_gemms_multiply_are_said(plan):
    site = replace(plan.sites[0], reads="gemm codes")
    words = explain(replace(plan, sites=(site, *plan.sites[1:])), site.tensor)
    assert "GEMMs multiply the codes of the stored copy, and backward reads it; all else reads" in words[3]


def test_a_budget_that_graphs_share_is_said(plan):
    peak = PeakBytes(budget=1_000_000, high=2_000_000, planned=700_000, compiled=690_000, graphs=2, beside=250_000)
    sites = [replace(s, way=way) for s, way in zip(plan.sites, ("narrow", "narrow", "recompute", "keep"), strict=False)]
    sites[1] = replace(sites[1], saved_as="int4")
    held = replace(plan, peak_bytes=replace(peak, kept=("sum_1",)), sites=(*sites, *plan.sites[4:]))
    first, second, third = explain(held, "peak_budget")
    assert first == "peak_budget 1,000,000 bytes shared by 2 graphs of the step, 750,000 of it for this one"
    assert "holds 700,000 bytes as predicted, 690,000 as compiled; 2,000,000 with everything kept" in second
    assert third.endswith("1 are kept in int4, 1 are recomputed, 1 are kept; 1 without a site are kept")
    assert "shared by 2 graphs of the step, 750,000 of it for this one" in explain(held, sites[0].tensor)[1]
    alone = replace(held, peak_bytes=replace(peak, graphs=1, beside=0))
    assert not any("shared" in line for line in (*explain(alone, "peak_budget"), *explain(alone, sites[0].tensor)))


def test_a_high_group_and_a_promotion_need_no_reason():
    high = trained(low_ratio=0.0)
    assert not [s for s in high.sites if s.why]
    assert said(high, "x")[2] == "recipe 'fp8' holds a high output in bf16"


def test_the_reasons_are_in_the_plan_file_and_survive_following_it(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.promote([0], step=3).save(path)
    rows = json.loads(path.read_text())["sites"]
    assert "why" not in rows[0]
    assert sum("why" in row for row in rows) == sum(bool(s.why) for s in plan.sites) > 9
    followed = trained(plan=path, low_ratio=None)
    assert {s.tensor: s.why for s in followed.sites} == {s.tensor: s.why for s in plan.sites}
    assert followed.sites[0].promoted_at == 3


def test_diff_does_not_repeat_the_reason_of_a_format_that_moved(plan):
    other = trained(low_ratio=0.0)
    assert not [line for line in differences(plan, other) if "nobody" in line]


def test_a_group_switched_by_hand_drops_the_reasons(plan):
    groups = tuple(replace(g, low=False) for g in plan.groups)
    assert not [s for s in as_edited(replace(plan, groups=groups)).sites if s.why and s.kind != "grad_param"]


def test_the_texts_and_the_page_show_who_reads(plan, place):
    folder = place / "graph-0"
    text = next(folder.glob("*-compute-high.txt")).read_text()
    line = next(line for line in text.splitlines() if "fxprec.quantize" in line and "site 0 " in line)
    assert "site 0 e4m3fn, reads backward" in line
    assert "reads" not in next(folder.glob("*-insert-casts.txt")).read_text(), "casts have all readers at first"
    page = (folder / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [data["texts"][site[-1]] for site in data["sites"]] == [s.reads for s in plan.sites]
    assert '{ name: "reads"' in page
