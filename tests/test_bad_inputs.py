"""Bad inputs of every kind: a typed error of ours each, in one line that names the thing, the cause and the way out."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxprec
from fxprec import Accumulator, Backend, BlockFormat, Config, Format, GradScaling, LossScaling, Plan, Recipe, cli
from fxprec.driver.named import register_backend
from fxprec.errors import BudgetError, ConfigError, FallbackError, FormatError, FxprecError, LoweringError, PlanError
from fxprec.integrations import compile_layers
from fxprec.integrations.alerts import alerts_of
from fxprec.integrations.backends import backends_in
from fxprec.numerics import formats
from fxprec.numerics.blocks import find_blocks

ONES = torch.ones(4)
FORMAT_NAMES = "use one of ['fp32', 'fp16', 'fp16_sat', 'bf16', 'e5m2', 'e5m2_sat', 'e4m3fn', 'e4m3fn_nan'] or 1-E-M"
SIZE = "give it a positive number of bytes, as an int or as text such as '12GiB'"


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def train(x: torch.Tensor | None = None, model: nn.Module | None = None, **options: Any) -> Backend:
    """One step through Dynamo, of a small model unless another is given."""
    given = {"lowering": "eager", "recipe": "hfp8", **options}
    compiled = torch.compile(model or net(), backend="fxprec", options=given)
    compiled(torch.ones(2, 4) if x is None else x).sum().backward()
    return fxprec.backend_of(compiled)


@cache
def trained() -> tuple[str, dict[str, Any]]:
    """A plan and a backend's state, as JSON text and as `state_dict` returns it."""
    backend = train()
    return json.dumps(backend.plans[0].to_dict()), backend.state_dict()


def plan(**edits: Any) -> None:
    """Read the plan with other entries: ``key`` of the whole, ``key_0`` of the first site; None takes one away."""
    data = json.loads(trained()[0])
    for name, value in edits.items():
        key, first, _ = name.rpartition("_0")
        place = data["sites"][0] if first else data
        place[key if first else name] = value
        if value is None:
            del place[key if first else name]
    Plan.from_dict(data)


def state(**edits: Any) -> None:
    """Load the state with other entries of its graph; None takes one away."""
    graphs = json.loads(trained()[1]["graphs"])
    for name, value in edits.items():
        graphs[0][name] = value
        if value is None:
            del graphs[0][name]
    Backend(Config(recipe="hfp8")).load_state_dict({"version": 3, "graphs": json.dumps(graphs)})


def file(content: bytes) -> None:
    Path("plan.json").write_bytes(content)
    Plan.load("plan.json")


def raising(tensors: Any, config: Any) -> Any:
    raise ValueError("no\nsuch")


Case = tuple[Callable[[], object], type[FxprecError], str]


def option(words: str, **options: Any) -> Case:
    return partial(Config, **options), ConfigError, words


def recipe(words: str, **fields: Any) -> Case:
    return partial(Recipe, **{"hi": "bf16", "lo_forward": "e5m2", "lo_backward": "e5m2", **fields}), ConfigError, words


def case(kind: type[FxprecError], words: str, function: Callable[..., object], *args: Any, **kwargs: Any) -> Case:
    return partial(function, *args, **kwargs), kind, words


OPTIONS: Mapping[str, Case] = {
    "near": option("unknown option 'lowratio'; did you mean 'low_ratio'? It takes a number from 0 to 1", lowratio=1),
    "far": option("unknown option 'zzz'; the options are recipe, storage,", zzz=1),
    "recipe": option("unknown recipe 'fp9'; did you mean 'fp8'?; allowed: 'fp32', 'bf16'", recipe="fp9"),
    "recipe none": option("recipe is None; give it one of 'fp32', 'bf16'", recipe=None),
    "recipe saved": option("recipe.saved: unknown format 'int9'; did you mean 'int8'?; block", recipe="fp8+int9"),
    "recipe plus": option("recipe 'fp8+' names no block format after '+'; write for instance 'fp8+", recipe="fp8+"),
    "recipe high": option(
        "recipe.saved is int4, for copies of low tensors that only backward reads, and no tensor of recipe "
        "'bf16+int4' is low; use it with fp8",
        recipe="bf16+int4",
    ),
    "storage": option("unknown storage 'disk'; allowed: 'native', 'packed', 'simulate'", storage="disk"),
    "storage native": option(
        "storage='native' cannot hold recipe 'hfp8': torch has no dtype for 1-6-9, 1-4-3+4, 1-5-2; use storage=",
        recipe="hfp8",
        storage="native",
    ),
    "compute": option("unknown compute 'low'; allowed: 'high', or None", compute="low"),
    "compute stored": option(
        "compute='stored' is gone: native and packed storage have operators read values,", compute="stored"
    ),
    "compute simulate": option(
        "compute='high' has operators read values, and storage='simulate' has them read rounded ones; leave compute out",
        compute="high",
        storage="simulate",
    ),
    "policy": option("unknown policy 'biggest'; allowed: 'size',", policy="biggest"),
    "policy type": option("policy is 3; give it one of 'size',", policy=3),
    "ratio": option("low_ratio is -0.1, out of range; give it a number from 0 to 1, or None", low_ratio=-0.1),
    "ratio text": option("low_ratio is 'half'; give it a number from 0 to 1, or None", low_ratio="half"),
    "ratio nan": option("low_ratio is NaN; give it a number from 0 to 1, or None", low_ratio=float("nan")),
    "ratio bool": option("low_ratio is True; give it a number from 0 to 1, or None", low_ratio=True),
    "budget": option(f"activation_budget is 0, not positive; {SIZE}", activation_budget=0),
    "budget unit": option(f"activation_budget is '9 apples', which is no size; {SIZE}", activation_budget="9 apples"),
    "budget share": option(f"activation_budget is '50%', which is no size; {SIZE}", activation_budget="50%"),
    "peak": option("peak_budget is '120%'; give it a share above 0% and up to 100%", peak_budget="120%"),
    "peak and other": option(
        "peak_budget and activation_budget are both given, and activation_budget bounds what is saved for backward, "
        "which peak_budget does too; keep one of them",
        peak_budget="50%",
        activation_budget=5,
    ),
    "peak simulate": option(
        "peak_budget bounds what a step holds where operators read values, and storage='simulate' has them read "
        "rounded ones; leave storage out",
        peak_budget="50%",
        storage="simulate",
    ),
    "ways": option("unknown ways 'ofload'; did you mean 'offload'?", peak_budget="50%", ways=("ofload",)),
    "ways in CUDA graphs": option(
        "ways has 'offload', and mode='reduce-overhead' records CUDA graphs, which copies to host memory are no part of",
        peak_budget="50%",
        ways=("offload",),
        mode="reduce-overhead",
    ),
    "ways alone": option("ways says how a peak budget is met, and none is given; give peak_budget too", ways="narrow"),
    "plan": option("plan is ''; give it the path of a plan file, or None", plan=""),
    "goals": option(
        "low_ratio and plan are both given, and each decides how much is low; keep one", low_ratio=0.5, plan="p"
    ),
    "keep_high": option("keep_high is the text 'a'; give it a tuple of patterns, ('a',), or 'ends'", keep_high="a"),
    "keep_high type": option("keep_high is (1,); give it a tuple of module-name patterns, or 'ends'", keep_high=(1,)),
    "promote": option("promote_above is 0, out of range; give it a number above 0 and up to 1", promote_above=0),
    "scaling": option("unknown grad_scaling 'big'; allowed: 'auto', 'none', 'fixed', 'dynamic'", grad_scaling="big"),
    "accumulator": option(f"accumulator: unknown format 'wide'; {FORMAT_NAMES}", accumulator="wide"),
    "accumulator wide": option(
        "accumulator is 1-8-22, one mantissa bit short of float32, which carries the sums and would round them twice; "
        "use at most 21 mantissa bits",
        accumulator="1-8-22",
    ),
    "accumulator real": option(
        "accumulator simulates sums that no machine has, and storage='packed' computes GEMMs on the machine's own; "
        "use storage='simulate'",
        accumulator="fp16",
        storage="packed",
    ),
    "lowering": option("unknown lowering 'cuda'; allowed: 'auto', 'triton', 'inductor', 'eager'", lowering="cuda"),
    "gemms": option("unknown gemms 'fast'; allowed: 'auto', 'low', 'high'", gemms="fast"),
    "fast_accum": option("fast_accum is 1; give it True or False", fast_accum=1),
    "mode": option("unknown mode 'fast'; allowed: 'default', 'reduce-overhead'", mode="fast"),
    "mode eager": option(
        "mode='max-autotune' tunes Inductor, which lowering='eager' does not run; leave one of them out",
        mode="max-autotune",
        lowering="eager",
    ),
    "dump": option("dump is 3; give it the path of a folder, or None", dump=3),
    "tensors": option("dump_tensors is the text 'a'; give it a tuple, ('a',)", dump_tensors="a"),
    "tensors kind": option(
        "unknown kind of tensor in dump_tensors pattern 'a:out': 'out'; did you mean 'output'?; allowed: 'output'",
        dump_tensors=("a:out",),
    ),
    "tensors where": option(
        "dump_tensors pattern ':param' names no module or tensor; write '*:param'", dump_tensors=(":param",)
    ),
    "every": option("dump_every is 0; give it an int of at least 1", dump_every=0),
    "limit": option(f"dump_limit is 'much', which is no size; {SIZE}", dump_limit="much"),
    "strict": option("strict is 'yes'; give it True or False", strict="yes"),
    "grouping": option("unknown grouping 'layers'; allowed: 'execution', 'dataflow'", grouping="layers"),
    "seed": option("seed is -1; give it an int of at least 0", seed=-1),
    "nonfinite": option(
        "unknown on_nonfinite 'stop'; allowed: 'report', 'raise', 'ignore', or None", on_nonfinite="stop"
    ),
    "no dict": case(
        ConfigError, "options is [('recipe', 'fp8')]; give it a dict", Config.from_options, [("recipe", "fp8")]
    ),
    "no text": case(ConfigError, "option name 3 is no text; the options are recipe,", Config.from_options, {3: 4}),
    "underflow": case(
        ConfigError, "grad_scaling.underflow is 0.0; it must lie between 0 and 1", GradScaling, underflow=0
    ),
    "interval": case(ConfigError, "grad_scaling.interval is 0; give it an int of at least 1", GradScaling, interval=0),
    "estimate": case(
        ConfigError,
        "unknown grad_scaling.estimate 'guess'; allowed: 'statistical', 'histogram'",
        GradScaling,
        estimate="guess",
    ),
    "no scaling": case(
        ConfigError,
        "GradScaling has no option 'intervall'; did you mean 'interval'?; it has underflow, interval, estimate",
        GradScaling,
        intervall=3,
    ),
    "loss scale": case(
        ConfigError,
        "grad_scaling.initial is 1000.0; it must be a power of two from 2**-60 to 2**60",
        LossScaling,
        initial=1e3,
    ),
    "chunk": case(
        ConfigError, "accumulator.chunk is 0; give it an int of at least 1", Accumulator, format="fp16", chunk=0
    ),
    "no accumulator": case(
        ConfigError, "Accumulator needs 'format', which is missing; add it", Accumulator, kahan=True
    ),
}

RECIPES: Mapping[str, Case] = {
    "hi": recipe("recipe.hi: unknown format 'bf17'; did you mean 'bf16'?; use one of", hi="bf17"),
    "wider": recipe(
        "recipe.lo_forward is fp32 (32 bits), wider than hi bf16 (16 bits); swap them or choose", lo_forward="fp32"
    ),
    "type": recipe("recipe.hi is 16; give it a fxprec.Format or a format name such as 'e5m2'", hi=16),
    "block": recipe(
        "recipe.lo_forward is the block format 'int4', which only what is saved can have; use saved=", lo_forward="int4"
    ),
    "saved": recipe("recipe.saved: 'e5m2' has no blocks; give a block format, such as 'mxfp4', 'int4'", saved="e5m2"),
    "name": recipe("recipe.name is ''; give it a non-empty text", name=""),
    "pure": recipe("recipe.pure wants a hi of 16 bits that torch has a dtype for, not 1-6-9", hi="1-6-9", pure=True),
    "role": recipe("Recipe has no option 'low'; it has hi, lo_forward, lo_backward,", low="e5m2"),
    "missing": case(ConfigError, "Recipe needs 'lo_forward', which is missing; add it", Recipe, hi="bf16"),
}

FORMATS: Mapping[str, Case] = {
    "near": case(FormatError, "unknown format 'e4m3'; did you mean 'e4m3fn'?; use one of", formats.parse, "e4m3"),
    "syntax": case(FormatError, f"unknown format '1-4'; {FORMAT_NAMES}", formats.parse, "1-4"),
    "type": case(FormatError, "8 is no format; give a fxprec.Format or a name such as 'e4m3fn'", formats.parse, 8),
    "exponent": case(
        FormatError, "exponent_bits=0 is out of range for a float of at most 32 bits; use 1 to 8", Format, 0, 7
    ),
    "mantissa": case(
        FormatError, "mantissa_bits=24 is out of range for a float of at most 32 bits; use 0 to 23", Format, 8, 24
    ),
    "float": case(FormatError, "exponent_bits=4.0 is no integer; use 1 to 8", Format, 4.0, 3),
    "bias": case(FormatError, "bias=0.5 is no integer; a format's bias is a whole number", Format, 4, 3, bias=0.5),
    "specials": case(
        FormatError, "specials='nan' is unknown; use one of ['fn', 'ieee', 'none']", Format, 4, 3, specials="nan"
    ),
    "overflow": case(
        FormatError,
        "overflow='inf' has no code in a format with specials='none'; use one of ['saturate']",
        Format,
        4,
        3,
        overflow="inf",
    ),
    "range": case(
        FormatError,
        "1-8-3 with bias 100 spans 2^-226 to 2^28, beyond float32, which carries every value; choose a bias",
        Format,
        8,
        3,
        bias=100,
    ),
    "ieee": case(
        FormatError, "1-1-3 cannot be IEEE-like: inf and NaN need an exponent code", Format, 1, 3, specials="ieee"
    ),
    "field": case(
        FormatError,
        "a format has no field 'exponent'; did you mean 'exponent_bits'?; use",
        Format.from_dict,
        {"exponent": 3},
    ),
    "block size": case(
        FormatError,
        "block=7 is no size of a block; use a power of two",
        BlockFormat,
        Format(4, 3),
        block=7,
        scale="e8m0",
    ),
    "block name": case(FormatError, "unknown format 'mxfp5'; did you mean 'mxfp", find_blocks, "mxfp5"),
    "no blocks": case(FormatError, "'bf16' has no blocks; give a block format, such as 'mxfp4'", find_blocks, "bf16"),
}

TENSORS: Mapping[str, Case] = {
    "integers": case(
        FormatError, "torch.int32 holds no numbers to round; give float32,", fxprec.quantize, ONES.int(), "e5m2"
    ),
    "float64": case(
        FormatError,
        "float64 would be rounded twice, through float32; convert with .float()",
        fxprec.quantize,
        ONES.double(),
        "e5m2",
    ),
    "list": case(
        FormatError, "what is to be rounded is of type list; give a torch.Tensor", fxprec.quantize, [1.0], "e5m2"
    ),
    "text": case(
        FormatError, "what is to be rounded is of type str; give a torch.Tensor", fxprec.encode, "1.0", "e5m2"
    ),
    "rounding": case(
        FormatError, "rounding='up' is unknown; use one of ['nearest',", fxprec.quantize, ONES, "e5m2", rounding="up"
    ),
    "narrow": case(
        FormatError,
        "torch.float16 cannot hold every number of 1-8-5; quantize x.float() instead",
        fxprec.quantize,
        ONES.half(),
        "1-8-5",
    ),
    "out": case(
        FormatError,
        "out is (2,) torch.float32 on cpu, the input (4,) torch.float32 on cpu; make out with torch.empty_like(x)",
        fxprec.quantize,
        ONES,
        "e5m2",
        out=ONES[:2],
    ),
    "codes": case(
        FormatError,
        "codes of e5m2 are torch.uint8, not torch.float32; view or convert them to torch.uint8",
        fxprec.decode,
        ONES,
        "e5m2",
    ),
    "block codes": case(
        FormatError,
        "codes of mxfp4 are a fxprec.BlockCodes, not Tensor; use encode's result",
        fxprec.decode,
        ONES.byte(),
        "mxfp4",
    ),
}

NO_STATE = "this is no state of fxprec.Backend version 3; pass what state_dict() returned"
NO_JSON = (
    "plan.json: is not valid JSON at line 1, column 2: Expecting property name enclosed in double quotes; it may be"
)
FILES: Mapping[str, Case] = {
    "none": case(PlanError, "none.json: cannot be read: No such file or directory; give the", Plan.load, "none.json"),
    "folder": case(PlanError, ".: is no regular file; give the path of a plan file", Plan.load, "."),
    "no JSON": case(PlanError, NO_JSON, file, b"{"),
    "no text": case(PlanError, "plan.json: is not UTF-8 (byte 0); give a plan file", file, b"\xff\xfe"),
    "deep": case(PlanError, "plan.json: is nested too deeply for a plan file; give one", file, b"[" * 100_000),
    "list": case(PlanError, "plan.json: top level: is []; it must be an object", file, b"[]"),
    "number": case(PlanError, "top level: is 3; it must be an object", Plan.from_dict, 3),
    "schema": case(PlanError, "schema: is 99, and this fxprec reads 1; plan again with this", plan, schema=99),
    "no schema": case(PlanError, "top level: has no 'schema'; add it, or plan again", plan, schema=None),
    "unknown": case(PlanError, "top level: has an unknown key 'extra'; remove it, or update fxprec", plan, extra=1),
    "infinite": case(
        PlanError, "achieved_low_ratio: is inf; it must be a finite number", plan, achieved_low_ratio=float("inf")
    ),
    "storage": case(PlanError, "storage: is 'disk'; it must be one of 'native', 'packed'", plan, storage="disk"),
    "recipe": case(PlanError, "recipe: is 'fp8'; it must be an object", plan, recipe="fp8"),
    "format": case(PlanError, f"sites[0].format: unknown format 'e9'; {FORMAT_NAMES}", plan, format_0="e9"),
    "no tensor": case(PlanError, "sites[0]: has no 'tensor'; add it, or plan again", plan, tensor_0=None),
    "id": case(PlanError, "sites[0].id: is 7, not 0; number the entries 0, 1, 2, ... in order", plan, id_0=7),
    "group": case(PlanError, "sites[0].group: is 99, and there is no such group; name one in", plan, group_0=99),
    "kind": case(PlanError, "sites[0].kind: is 'weight'; it must be one of 'output', 'param'", plan, kind_0="weight"),
    "state": case(PlanError, NO_STATE, Backend().load_state_dict, 3),
    "state version": case(PlanError, NO_STATE, Backend().load_state_dict, {"version": 9}),
    "state text": case(
        PlanError,
        "the saved state is damaged: its graphs are no JSON (Expecting",
        Backend().load_state_dict,
        {"version": 3, "graphs": "{"},
    ),
    "state graphs": case(
        PlanError,
        "the saved state is damaged: its graphs are not a list of states; pass what state_dict() returned",
        Backend().load_state_dict,
        {"version": 3, "graphs": 7},
    ),
    "state step": case(PlanError, "graphs[0].step: is -1; it must be an int from 0 to 2**53", state, step=-1),
    "state plan": case(PlanError, "graphs[0]: has no 'plan'; pass what state_dict() returned", state, plan=None),
}

MODELS: Mapping[str, Case] = {
    "budget": case(
        BudgetError,
        "activation_budget is 1 bytes, but with recipe 'hfp8' and policy 'size' what is saved for backward takes at "
        "least 32 bytes; raise the budget to that",
        train,
        activation_budget=1,
    ),
    "plan": case(PlanError, "none.json: cannot be read: No such file or directory; give", train, plan="none.json"),
    "float64": case(
        LoweringError,
        "is float64: fxprec holds float32, bfloat16 and float16 only; convert the model with .float()",
        train,
        torch.ones(2, 4).double(),
        net().double(),
    ),
    "device": case(
        LoweringError,
        "device 'meta': fxprec lowers to cpu and cuda only; move the model there",
        train,
        torch.ones(2, 4, device="meta"),
        net().to("meta"),
    ),
    "policy raises": case(
        ConfigError,
        "test_bad_inputs:raising raised ValueError: no such; it is called as f(tensors, config)",
        train,
        policy=raising,
    ),
    "policy ids": case(
        ConfigError,
        "returned 99, which is no group; let it return a collection of group ids, 0 to 2",
        train,
        policy=lambda tensors, config: {99},
    ),
    "policy number": case(
        ConfigError,
        "returned 7; let it return a collection of group ids, 0 to 2",
        train,
        policy=lambda tensors, config: 7,
    ),
    "pattern": case(
        FallbackError,
        "keep_high pattern 'nope*' matches no module; modules are 0, 1, 2",
        train,
        keep_high=("nope*",),
        strict=True,
    ),
    "no folder": case(
        ConfigError, "dump_tensors has no folder to write to; give dump='DIR' too", train, dump_tensors=("0:output",)
    ),
    "pure": case(
        ConfigError,
        "recipe 'bf16-pure' keeps weights in torch.bfloat16, and 0.weight is torch.float32; call model.to",
        train,
        recipe="bf16-pure",
    ),
    "fp32": case(
        FallbackError,
        "low_ratio=0.5 has no effect: recipe 'fp32' holds everything in float32; choose a recipe with a low",
        train,
        recipe="fp32",
        low_ratio=0.5,
        strict=True,
    ),
    "uncompiled": case(
        ConfigError, "Sequential was not compiled by fxprec; give backend_of what", fxprec.backend_of, net()
    ),
    "no part": case(ConfigError, "fxprec compiled no part of this Sequential; call model.compile(", backends_in, net()),
    "no layer": case(
        ConfigError,
        "no module of class 'Block' to compile; this model has Linear, ReLU, Sequential",
        compile_layers,
        net(),
        "Block",
    ),
    "backend name": case(
        ConfigError,
        "backend 'inductor' is registered already, for something else; choose another name",
        register_backend,
        "inductor",
        {},
    ),
    "alerts": case(ConfigError, "alerts is 3; give it a tuple of (pattern, rule)", alerts_of, 3),
    "alert": case(
        ConfigError, "alert rule 'big' is no comparison; write it as 'overflow_ratio > 0.01'", alerts_of, [("a", "big")]
    ),
    "choose": case(
        ConfigError, "train is int; give a function train(backend, seed) that returns a score", fxprec.choose, 3
    ),
    "doctor": case(
        ConfigError, "model is int; give fxprec.doctor a torch.nn.Module, not compiled", fxprec.doctor, 3, ONES
    ),
    "aps": case(ConfigError, "APS scaling='big' is unknown; use one of [", fxprec.aps.APSState, "1-5-2", scaling="big"),
}

API = {"options": OPTIONS, "recipes": RECIPES, "formats": FORMATS, "tensors": TENSORS, "files": FILES, "models": MODELS}


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [pytest.param(*given, id=f"{part}-{name}") for part, cases in API.items() for name, given in cases.items()],
)
def test_one_line_says_what_is_wrong_and_the_way_out(
    function: Callable[[], object],
    kind: type[FxprecError],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained()
    torch.compiler.reset()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FxprecError) as caught:  # Dynamo hands over a type that is this one and its own
        function()
    assert isinstance(caught.value, kind)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


TARGET = "give path/file.py:factory or module:callable"
COMMANDS: Mapping[str, tuple[str, str]] = {
    "dump nowhere": ("dump nowhere", f"target 'nowhere' names no factory; {TARGET}"),
    "dump no_such:f": ("dump no_such:f", "cannot import no_such: ModuleNotFoundError: No module named 'no_such'; give"),
    "dump none.py:f": ("dump none.py:f", "cannot import none.py: FileNotFoundError: [Errno 2] No such file"),
    "near": ("dump bad_targets:nubmer", "bad_targets has no callable 'nubmer'; did you mean 'number'?; give path"),
    "number": ("dump bad_targets:number", "returned int; let it return (model, example inputs), the inputs a tensor"),
    "raises": ("dump bad_targets:raises", "under fake tensors: ZeroDivisionError: division by zero; make it run as"),
    "fp32": (
        "dump a:b --recipe fp32",
        "recipe 'fp32' holds everything in float32, so there is nothing to plan; choose",
    ),
    "exact": ("dump a:b --policy exact", "policy 'exact' measures a training step, and fxprec dump runs none; choose"),
    "ratio": ("dump a:b --low-ratio 2", "low_ratio is 2.0, out of range; give it a number from 0 to 1"),
    "diff": ("diff none.json none.json", "none.json: cannot be read: No such file or directory; give the path"),
    "explain": (
        "explain plan.json relu9",
        "'relu9' is no tensor or module of this plan; did you mean 'relu'?; plan.si",
    ),
    "empty": ("explain .. relu", "..: holds no dump (no graph-0); give a folder that dump= or fxprec dump wrote"),
    "report": ("report none", "none: cannot be read: No such file or directory; give the path of a plan file"),
    "tolerance": ("compare . . --tolerance nan", "--tolerance is nan; give a relative difference of at least 0"),
    "compare": ("compare . .", "holds no stats.jsonl, so nothing trained there; train with options={'dump': DIR}"),
    "ratios": ("choose bad_targets:number --ratios a,b", "--ratios 'a,b' is no list of numbers; write for instance"),
    "out of range": ("choose bad_targets:number --ratios 3", "ratios is 3.0, out of range; give it a number from 0"),
    "seeds": ("choose bad_targets:number --seeds 0", "seeds is 0; give it an int of at least 1"),
    "worse": ("choose bad_targets:number --tolerance -1", "tolerance is -1.0, out of range; give it how much worse"),
    "examine": ("doctor bad_targets:number", "returned int; let it return (model, batch) or (model, batch, loss)"),
    "damage": ("doctor bad_targets:model --tolerance -2", "tolerance is -2.0, out of range; give it a damage above 0"),
    "formats": ("doctor bad_targets:model --formats e9", f"formats: unknown format 'e9'; {FORMAT_NAMES}"),
    "states": ("doctor bad_targets:model --checkpoint no*.pt", "--checkpoint 'no*.pt' matches no file; give a pattern"),
    "predict": ("predict", "predict needs a plan file, or --paper; write one with Plan.save or the dump option"),
    "link": ("predict plan.json --link fast", "link rate 'fast' is not understood; write for instance 200Mbit/s"),
    "latency": ("predict plan.json --latency 2h", "time '2h' is not understood; write for instance 0.2ms"),
    "world": ("predict plan.json --world 0", "world size 0 is no number of ranks; give at least 1"),
    "groups": ("predict plan.json --group-size 3", "group size 3 does not divide 4 ranks into equal groups; give a"),
    "gpu": ("predict plan.json --gpu h999", "--gpu h999: no figures; there are"),
    "both": ("minify a:b --crash --error-above 1", "--crash and --error-above are both given; choose the failure"),
    "top": ("minify a:b --top 0", "--top is 0; give at least 1"),
    "lowering": (
        "minify a:b --lowering cuda",
        "unknown lowering 'cuda'; allowed: 'auto', 'triton', 'inductor', 'eager'",
    ),
    "threads": ("demo --threads 0", "--threads is 0; give at least 1"),
    "demo": ("demo --recipes fp9", "--recipes: unknown 'fp9'; did you mean 'fp8'?; allowed: fp32, bf16, fp8, hfp8"),
    "only": ("demo --only music", "--only: unknown 'music'; allowed: digits, text"),
}


def told(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command, run beside a plan file, says on standard error; its exit code is 2."""
    targets: Any = types.ModuleType("bad_targets")
    targets.number, targets.raises = lambda: 3, lambda: 1 / 0
    targets.model = lambda: (net(), torch.ones(2, 4))
    monkeypatch.setitem(sys.modules, "bad_targets", targets)
    Path("plan.json").write_text(trained()[0])
    with pytest.raises(SystemExit) as end:
        cli.main(command.split())
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("command", "words"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_says_so_in_one_line(
    command: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = told(command, monkeypatch, capsys)
    assert re.fullmatch(r"fxprec: error: [^\n]*\n", found)
    assert words in found


USAGE = {
    "dmup": "No such command 'dmup'. Did you mean 'dump'?",
    "dump a:b --recepi x": "No such option: --recepi",
    "diff a": "Missing argument 'b'",
    "dump a:b --low-ratio two": "Invalid value for '--low-ratio'",
}


@pytest.mark.parametrize(("command", "words"), USAGE.items())
def test_a_command_line_that_is_none_shows_its_usage(
    command: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = told(command, monkeypatch, capsys)
    assert words in found
    assert "--help" in found


def test_there_are_a_hundred() -> None:
    assert sum(map(len, API.values())) + len(COMMANDS) + len(USAGE) >= 100
