"""``dump_tensors``: the step's own values in files, whatever the lowering, in every n-th step and in no other."""

import json
import math
from collections import Counter

import pytest
import torch
from command_line import exit_code
from models import Parts
from torch import nn

import fxprec
from fxprec.diagnosis.rounding import rounded
from fxprec.driver.record import WatchedHalf
from fxprec.errors import ConfigError, FxprecWarning
from fxprec.numerics.blocks import find
from fxprec.numerics.rounding import COMPILE_ABOVE
from fxprec.report import safetensors
from fxprec.report.tensors import UNDERFLOWS, Dumped, Origin, facts, read_tensors


def net() -> nn.Module:
    layers = {"first": nn.Linear(16, 32), "last": nn.Linear(32, 4)}
    return Parts(lambda m, x: m.last(torch.dropout(torch.relu(m.first(x)), 0.25, True)), **layers)


def train(folder, patterns, *, steps=3, lowering="eager", recipe="fp8", **options):
    """Train, and return the weights and gradients of every step with the backend."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, seen = net(), []
    config = fxprec.Config(
        recipe=recipe,
        lowering=lowering,
        dump=folder,
        dump_tensors=patterns,
        dump_every=2 if patterns else None,
        **options,
    )
    call = torch.compile(model, backend=fxprec.Backend(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(64, 16) * 0.01
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        call(x).square().sum().backward()
        seen.append((weights, {name: p.grad.clone() for name, p in model.named_parameters()}, x))
        optimizer.step()
        optimizer.zero_grad()
    return seen, fxprec.backend_of(call)


def line(folder, name, step=1):
    rows = [row for row in read_tensors(folder) if f"{row['tensor']}:{row['kind']}" == name and row["step"] == step]
    assert len(rows) == 1, name
    return rows[0]


def test_a_dynamic_batch_stays_dynamic(tmp_path):
    """Comparing a symbolic number of elements with the traced one fixed the batch: torch's ConstraintViolationError."""
    config = fxprec.Config(recipe="fp8", lowering="eager", dump=tmp_path, dump_tensors=("*",), dump_every=1)
    call = torch.compile(net(), backend=fxprec.Backend(config))
    for rows in (64, 48):
        x = torch.randn(rows, 16)
        torch._dynamo.mark_dynamic(x, 0)
        call(x).square().sum().backward()
    assert len(fxprec.backend_of(call).plans) == 1
    assert {row["step"] for row in read_tensors(tmp_path / "graph-0")} == {1, 2}


@pytest.mark.parametrize(
    ("lowering", "options"),
    [
        ("eager", {}),
        ("eager", {"recipe": "hfp8"}),
        pytest.param("inductor", {}, marks=pytest.mark.inductor),
    ],
)
def test_files_hold_the_steps_own_values(lowering, options, tmp_path):
    seen, _ = train(tmp_path, ("*",), lowering=lowering, **options)
    folder = tmp_path / "graph-0"
    assert Counter(row["step"] for row in read_tensors(folder)).keys() == {1, 3}
    for step in (1, 3):
        weights, gradients, x = seen[step - 1]
        for name in weights:
            for kind, wanted in (("param", weights[name]), ("grad_param", gradients[name])):
                row = line(folder, f"{name}:{kind}", step)
                found = safetensors.load(folder / row["file"], f"{name}:{kind}")
                if kind == "param" or recipe_of(options) == "fp8":
                    assert torch.equal(found, wanted), name
                else:  # dumped as it comes into the cast that narrows it
                    assert torch.allclose(found, wanted, rtol=2e-3, atol=1e-5), name
        row = line(folder, "x:output", step)
        assert torch.equal(safetensors.load(folder / row["file"], "x:output"), x)


def recipe_of(options) -> str:
    return options.get("recipe", "fp8")


def test_a_gradient_is_the_one_autograd_computes(tmp_path):
    seen, _ = train(
        tmp_path,
        ("last:grad_output", "first:output"),
        recipe=fxprec.Recipe(hi="1-8-22", lo_forward="1-8-18", lo_backward="1-8-18", name="fine"),
        storage="simulate",
    )
    folder = tmp_path / "graph-0"
    names = [f"{row['tensor']}:{row['kind']}" for row in read_tensors(folder) if row["step"] == 1]
    assert sorted(names) == ["addmm:output", "addmm_1:grad_output"]
    weights, gradients, x = seen[0]
    row = line(folder, "addmm:output")
    hidden = safetensors.load(folder / row["file"], "addmm:output")
    assert torch.allclose(hidden, x @ weights["first.weight"].T + weights["first.bias"], atol=1e-5)
    row = line(folder, "addmm_1:grad_output")
    found = safetensors.load(folder / row["file"], "addmm_1:grad_output")
    assert torch.allclose(found.sum(0), gradients["last.bias"], atol=1e-4)


def test_numbers_of_a_line_are_those_of_its_file(tmp_path):
    package = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    train(tmp_path, ("first",), recipe="hfp8")
    row = line(tmp_path / "graph-0", "addmm:output")
    held = package.load_file(tmp_path / "graph-0" / row["file"])
    x, under = held["addmm:output"], held["addmm:output" + UNDERFLOWS]
    fmt = fxprec.formats.HFP8_143
    assert torch.equal(under, (x != 0) & (fxprec.quantize(x, fmt) == 0))
    assert int(under.sum()) == row["underflow"] > 0
    assert row["underflows_at"][0] == int(under.reshape(-1).nonzero()[0])
    assert sum(row["exponents"]["counts"]) + row["zeros"] == row["elements"] == x.numel()
    assert row["exponents"]["first"] == int(x[x != 0].abs().log2().floor().min())
    assert row["source"].startswith("test_tensor_dump.py:")


def test_training_goes_on_bit_for_bit_and_other_steps_compute_nothing_twice(tmp_path, monkeypatch):
    calls = []
    before = WatchedHalf.before
    monkeypatch.setattr(WatchedHalf, "before", lambda self, args: calls.append(1) or before(self, args))
    with_dump, _ = train(tmp_path / "a", ("*:output", "*:grad_output"), steps=4)
    assert len(calls) == 4  # two halves in each of two steps
    without, _ = train(tmp_path / "b", None, steps=4)
    for (a, g, _), (b, h, _) in zip(with_dump, without, strict=True):
        assert all(torch.equal(a[name], b[name]) and torch.equal(g[name], h[name]) for name in a)


def test_beyond_the_limit_there_are_hashes_alone(tmp_path):
    with pytest.warns(FxprecWarning, match=r"dump_tensors: .*: beyond dump_limit \(5,000 bytes\), so only their stat"):
        _, backend = train(tmp_path / "some", ("*:output",), dump_limit=5000)
    rows = list(read_tensors(tmp_path / "some" / "graph-0"))
    assert {row["file"] is None for row in rows} == {True, False}
    assert sum(f.stat().st_size for f in (tmp_path / "some/graph-0/tensors").iterdir()) < 5000 + 1000
    assert [event.kind for event in backend.events].count("limit") == 1
    train(tmp_path / "none", ("*:output",), dump_limit=0)
    hashes = list(read_tensors(tmp_path / "none" / "graph-0"))
    assert not (tmp_path / "none" / "graph-0" / "tensors").exists()
    assert [row["hash"] for row in hashes] == [row["hash"] for row in rows]


def test_the_report_draws_elements_by_exponent(tmp_path):
    train(tmp_path, ("first:output",))
    assert exit_code("report", tmp_path) == 0
    page = (tmp_path / "graph-0" / "report.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert {d["tensor"]: len(d["series"]) for d in data["dumped"]} == {"addmm": 2, "relu": 2, "mul": 2} or data[
        "dumped"
    ]
    assert 'id="dumped"' in page


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("frist:output", "pattern 'frist:output' matches nothing; did you mean 'first'?; modules are first, last"),
        ("first:grad_param", None),
        ("x:grad_output", "pattern 'x:grad_output' matches nothing: of these tensors there is output, no grad_output"),
    ],
)
def test_a_pattern_that_matches_nothing_teaches(pattern, words, tmp_path, recwarn):
    train(tmp_path, (pattern,), steps=1)
    said = [str(w.message) for w in recwarn if "dump_tensors" in str(w.message)]
    assert (said == []) if words is None else (words in said[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dump_tensors": "layers.3"}, "dump_tensors is the string 'layers.3'; give it a tuple, ('layers.3',)"),
        ({"dump_tensors": ()}, "give it a tuple of patterns 'module:kind'"),
        (
            {"dump_tensors": ("a:grad_outputs",)},
            "unknown kind of tensor in dump_tensors pattern 'a:grad_outputs': 'grad_outputs'; did you mean "
            "'grad_output'?; allo",
        ),
        ({"dump_tensors": (":output",)}, "dump_tensors pattern ':output' names no module or tensor; write '*:output'"),
        ({"dump_every": 0}, "dump_every is 0; give it an int of at least 1"),
        ({"dump_every": 2}, "dump_every is about the tensors that dump_tensors names, and none is named; give"),
        ({"dump_limit": "1GiB", "dump": "d"}, "for all of them, or leave dump_limit out"),
        ({"dump_limit": -1}, "dump_limit is -1, not positive"),
        ({"dump_limit": False}, "dump_limit is False"),
        (
            {"dump_limit": "much"},
            "dump_limit is 'much', which is not a size; give it a positive number of bytes, as an int",
        ),
    ],
)
def test_bad_options_are_one_line(options, words):
    with pytest.raises(ConfigError) as caught:
        fxprec.Config(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_folder_there_is_nowhere_to_write():
    """It is refused before a graph is captured."""
    with pytest.raises(ConfigError, match="dump_tensors has no folder to write to; give dump='DIR' too"):
        fxprec.Backend(fxprec.Config(recipe="fp8", dump_tensors=("*",)))


def test_where_nothing_is_planned_nothing_is_written_and_that_is_said(tmp_path):
    config = fxprec.Config(recipe="fp32", dump=tmp_path, dump_tensors=("*",))
    with pytest.warns(FxprecWarning, match="has no effect: recipe 'fp32' holds everything") as told:
        torch.compile(nn.Linear(2, 2), backend=fxprec.Backend(config))(torch.randn(2, 2))
    assert [str(warning.message).partition("=")[0] for warning in told] == ["dump", "dump_tensors"]


def test_a_damaged_index_is_told(tmp_path):
    (tmp_path / "tensors.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(fxprec.PlanError, match="line 1 is not a line of dump_tensors"):
        list(read_tensors(tmp_path))


def test_a_line_that_no_page_could_show_is_refused(tmp_path):
    train(tmp_path / "some", ("*",), steps=1)
    row = json.loads((tmp_path / "some/graph-0/tensors.jsonl").read_text().splitlines()[0])
    for name, value in (
        ("amax", 10**400),
        ("norm", None),
        ("underflow", 10**400),
        ("scale_exponent", math.nan),
        ("range", [math.nan]),
        ("half", []),
        ("tensor", "\ud800"),
        ("file", "/etc/passwd"),
        ("file", "../x"),
    ):
        (tmp_path / "tensors.jsonl").write_text(json.dumps(row | {name: value}) + "\n")
        with pytest.raises(fxprec.PlanError, match="line 1 is not a line of dump_tensors"):
            list(read_tensors(tmp_path))
    (tmp_path / "tensors.jsonl").write_text(json.dumps(row | {"amax": "inf"}) + "\n")
    assert next(read_tensors(tmp_path))["amax"] == math.inf


def test_a_large_tensor_is_rounded_whole_to_blocks_below_a_scale_of_the_tensor():
    """In pieces of 2^20 elements each piece had a scale of its own: no element of the first underflowed."""
    x = torch.full((COMPILE_ABOVE + 64,), 1e-3)
    x[-1] = 1e6
    origin = Origin(tensor="x", kind="output", module="", source="", site=None, format="nvfp4", scale_exponent=0)
    assert facts(Dumped(origin, x, x))[0]["underflow"] == x.numel() - 1
    assert torch.equal(rounded(x, find("nvfp4")), fxprec.quantize(x, "nvfp4"))
