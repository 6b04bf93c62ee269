"""Bad options and commands: an error of ours each, in one line that names the thing, the cause, the way out.

Errors of formats, tensors, plan files and single features are in those features' tests,
and of saved states in test_saved_state_fuzz.py.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import exit_code
from torch import nn

import fxprec
from fxprec import Accumulator, Backend, Config, GradScaling, Operands, Recipe
from fxprec.errors import ConfigError, FallbackError, FxprecError
from fxprec.plan.files import dumps

FORMAT_NAMES = "use one of ['fp32', 'fp16', 'fp16_sat', 'bf16', 'e5m2', 'e5m2_sat', 'e4m3fn', 'e4m3fn_nan'] or 1-E-M"
SIZE = "give it a positive number of bytes, as an int or as text such as '12GiB'"
TWO_GOALS = "are both given, and each decides how much is low; keep one of them, drop the other"
SCALINGS = "'auto', 'none', 'fixed', 'dynamic', or a fxprec.GradScaling or fxprec.LossScaling"
LOWERINGS = "'auto', 'triton', 'inductor', 'eager'"


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def train(**options: Any) -> Backend:
    """One step of a small model through Dynamo."""
    compiled = torch.compile(net(), backend="fxprec", options={"lowering": "eager", "recipe": "hfp8", **options})
    compiled(torch.ones(2, 4)).sum().backward()
    return fxprec.backend_of(compiled)


@cache
def plan() -> str:
    """The text of a plan file."""
    return dumps(train().plans[0])


Case = tuple[Callable[[], object], type[FxprecError], str]


def option(words: str, **options: Any) -> Case:
    return partial(Config, **options), ConfigError, words


def recipe(words: str, **fields: Any) -> Case:
    return partial(Recipe, **{"hi": "bf16", "lo_forward": "e5m2", "lo_backward": "e5m2", **fields}), ConfigError, words


def operands(words: str, **fields: Any) -> Case:
    return partial(Operands, **fields), ConfigError, words


def scaling(words: str, **fields: Any) -> Case:
    return partial(GradScaling, **fields), ConfigError, f"grad_scaling.{words}"


def case(kind: type[FxprecError], words: str, function: Callable[..., object], *args: Any, **kwargs: Any) -> Case:
    return partial(function, *args, **kwargs), kind, words


OPTIONS: Sequence[Case] = (
    option(
        "unknown option 'lowratio'; did you mean 'low_ratio'? It takes a number from 0 to 1 or None. The", lowratio=1
    ),
    option("unknown option 'zzz'; the options are recipe, storage, policy, low_ratio", zzz=1),
    option(
        "unknown recipe 'fp9'; did you mean 'fp8'?; allowed: 'fp32', 'bf16', 'bf16-pure', 'fp16', 'fp8', 'hfp8', "
        "'mxfp8', 'nvfp4', 'fp8+int4', 'hfp8+int4' or a fxprec.Recipe",
        recipe="fp9",
    ),
    option("recipe is None; give it one of 'fp32', 'bf16'", recipe=None),
    option("unknown storage 'naitve'; did you mean 'native'?; allowed: 'native', 'packed', 'sim", storage="naitve"),
    option(
        "storage='native' cannot hold recipe 'hfp8': torch has no dtype for 1-6-9, 1-4-3+4, 1-5-2; use "
        "storage='packed' (integer codes) or storage='simulate' (float32 carriers)",
        recipe="hfp8",
        storage="native",
    ),
    option(
        "unknown policy 'sise'; did you mean 'size'?; allowed: 'size', 'size-ascending', 'random', 'uniform', "
        "'operator', 'operator-io', 'exact', or a function f(tensors, config)",
        policy="sise",
    ),
    option("policy is 3; give it one of 'size',", policy=3),
    option("low_ratio is 1.01, out of range; give it a number from 0 to 1, or None", low_ratio=1.01),
    option("low_ratio is -0.1, out of range; give it a number from 0 to 1, or None", low_ratio=-0.1),
    option("low_ratio is 'half'; give it a number from 0 to 1, or None", low_ratio="half"),
    option("low_ratio is NaN; give it a number from 0 to 1, or None", low_ratio=float("nan")),
    option("low_ratio is True; give it a number from 0 to 1, or None", low_ratio=True),
    option(f"activation_budget is 0, not positive; {SIZE}", activation_budget=0),
    option(f"activation_budget is True; {SIZE}", activation_budget=True),
    option(f"activation_budget is 1500000000.0; {SIZE}", activation_budget=1.5e9),
    option("plan is ''; give it the path of a plan file, or None", plan=""),
    option("plan is 3; give it the path of a plan file, or None", plan=3),
    option(f"low_ratio and plan {TWO_GOALS}", low_ratio=0.5, plan="p"),
    option(f"low_ratio and activation_budget {TWO_GOALS}", low_ratio=0.5, activation_budget="1GiB"),
    option("keep_high is the string 'a'; give it a tuple of patterns, ('a',), or 'ends'", keep_high="a"),
    option("keep_high is ('fc', 3); give it a tuple of module-name patterns, or 'ends'", keep_high=("fc", 3)),
    option("keep_high is ('',); give it a tuple of module-name patterns, or 'ends'", keep_high=("",)),
    option("promote_above is 0, out of range; give it a number above 0 and up to 1, or None", promote_above=0),
    option("promote_above is 1.5, out of range; give it a number above 0 and up to 1, or", promote_above=1.5),
    option("promote_above is False; give it a number above 0 and up to 1, or None", promote_above=False),
    option(f"unknown grad_scaling 'dinamic'; did you mean 'dynamic'?; allowed: {SCALINGS}", grad_scaling="dinamic"),
    option(f"grad_scaling is 65536; give it one of {SCALINGS}", grad_scaling=65536),
    option(f"unknown lowering 'tritn'; did you mean 'triton'?; allowed: {LOWERINGS}", lowering="tritn"),
    option("unknown gemms 'fast'; allowed: 'auto', 'low', 'high'", gemms="fast"),
    option("fast_accum is 1; give it True or False", fast_accum=1),
    option("unknown mode 'fast'; allowed: 'default', 'reduce-overhead'", mode="fast"),
    option(
        "mode='max-autotune' tunes Inductor, which lowering='eager' does not run; leave one of them out",
        mode="max-autotune",
        lowering="eager",
    ),
    option("dump is 3; give it the path of a folder, or None", dump=3),
    option("dump is ''; give it the path of a folder, or None", dump=""),
    option("strict is 1; give it True or False", strict=1),
    option("verify is 'yes'; give it True or False", verify="yes"),
    option("unknown grouping 'datafow'; did you mean 'dataflow'?; allowed: 'exec", grouping="datafow"),
    option("seed is -1; give it an int of at least 0", seed=-1),
    option("seed is True; give it an int of at least 0", seed=True),
    case(ConfigError, "options is [('recipe', 'fp8')]; give it a dict", Config.from_options, [("recipe", "fp8")]),
    case(ConfigError, "option name 3 is not a string; the options are recipe,", Config.from_options, {3: 4}),
    scaling("underflow is 0.0; it must lie between 0 and 1, both excluded", underflow=0),
    scaling("underflow is 1.0; it must lie between 0 and 1, both excluded", underflow=1.0),
    scaling("underflow is True; give it a number between 0 and 1, both excluded", underflow=True),
    scaling("interval is 0; give it an int of at least 1", interval=0),
    scaling("interval is 1.5; give it an int of at least 1", interval=1.5),
    scaling("estimate 'histo'; did you mean 'histogram'?; allowed: 'statistical', 'histogram'", estimate="histo"),
    case(
        ConfigError,
        "GradScaling has no option 'intervall'; did you mean 'interval'?; it has underflow, interval, estimate",
        GradScaling,
        intervall=3,
    ),
    case(ConfigError, "Accumulator needs 'format', which is missing; add it", Accumulator, kahan=True),
)

RECIPES: Sequence[Case] = (
    recipe("recipe.hi: unknown format 'bf17'; did you mean 'bf16'?; use one of", hi="bf17"),
    recipe("recipe.lo_forward: exponent_bits=0 is out of range for a float of at most 32 bits", lo_forward="1-0-3"),
    recipe("recipe.lo_forward is fp32 (32 bits), wider than hi bf16 (16 bits); swap them or choose", lo_forward="fp32"),
    recipe("recipe.hi is 16; give it a fxprec.Format or a format name such as 'e5m2'", hi=16),
    operands("operands.forward: unknown format 'nvfp5'; did you mean 'nvfp4'?", forward="nvfp5"),
    operands("operands.weight_grad is 4; give it a fxprec.BlockFormat or its name, such as 'mxfp8'", weight_grad=4),
    operands("operands.forward is int4, integers with an offset, which no GEMM multiplies; give it", forward="int4"),
    recipe("recipe.smooth_swiglu is 1; give it True or False", smooth_swiglu=1),
    operands("operands.hadamard is 1; give it True or False", weight_grad="nvfp4", hadamard=1),
    operands("operands names no format; give one of forward, input_grad, weight_grad, or leave operands out"),
    operands(
        "operands.hadamard rotates the operands of weight_grad, which has no format", forward="nvfp4", hadamard=True
    ),
    operands("operands.stochastic rounds gradients, and neither input_grad nor", forward="nvfp4", stochastic=True),
    operands(
        "operands.eden is True; give it the length of the vectors to rotate, one of (16, 32, 64, 128)",
        weight_grad="nvfp4",
        eden=True,
    ),
    operands(
        "operands.eden already rotates and rounds the operands that hadamard",
        weight_grad="nvfp4",
        eden=16,
        hadamard=True,
    ),
    operands("operands.eden rounds the operands of gradients, and neither", forward="nvfp4", eden=16),
    operands("operands.eden: the scales of mxfp4 are powers of two", weight_grad="mxfp4", eden=16),
    operands("operands.eden: blocks of 1-2-1/32:e4m3fn are larger than", weight_grad="1-2-1/32:e4m3fn", eden=16),
    operands("operands.high_after is -1; give it an int", weight_grad="nvfp4", high_after=-1),
    operands("operands.square_weights rounds weights, which forward and", weight_grad="nvfp4", square_weights=True),
    operands(
        "operands.square_weights would make squares of 128 x 128 elements of 1-2-1/128:e8m0; use blocks of at most 64",
        forward="1-2-1/128:e8m0",
        square_weights=True,
    ),
    recipe(
        "recipe.operands is 'nvfp4'; give it a fxprec.Operands, such as Operands(forward='mxfp8')", operands="nvfp4"
    ),
    recipe("recipe.name is ''; give it a non-empty text", name=""),
    recipe("Recipe has no option 'low'; it has hi, lo_forward, lo_backward,", low="e5m2"),
    case(ConfigError, "Recipe needs 'lo_forward', which is missing; add it", Recipe, hi="bf16"),
)

OTHERS: Sequence[Case] = (
    case(
        FallbackError,
        "low_ratio=0.5 has no effect: recipe 'fp32' holds everything in float32; choose a recipe with a low",
        train,
        recipe="fp32",
        low_ratio=0.5,
        strict=True,
    ),
    case(ConfigError, "unknown APS scaling 'big'; allowed: ", fxprec.aps.APSState, "1-5-2", scaling="big"),
)


@pytest.mark.parametrize(
    ("function", "kind", "words"), [pytest.param(*given, id=given[2][:50]) for given in (*OPTIONS, *RECIPES, *OTHERS)]
)
def test_one_line_says_what_is_wrong_and_the_way_out(
    function: Callable[[], object], kind: type[FxprecError], words: str
) -> None:
    with pytest.raises(FxprecError) as caught:  # Dynamo hands over a type that is this one and its own
        function()
    assert isinstance(caught.value, kind)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


TARGET = "give path/file.py:factory or module:callable"
COMMANDS: Mapping[str, tuple[str, str]] = {
    "dump no_such:f": ("dump no_such:f", "cannot import no_such: ModuleNotFoundError: No module named 'no_such'; give"),
    "dump none.py:f": ("dump none.py:f", "cannot import none.py: FileNotFoundError: [Errno 2] No such file"),
    "raises": (
        "dump bad_targets:raises",
        "under fake tensors: ZeroDivisionError: division by zero (test_bad_inputs.py:",
    ),
    "exact": ("dump a:b --policy exact", "policy 'exact' measures a training step, and fxprec dump runs none; choose"),
    "ratio": ("dump a:b --low-ratio 2", "low_ratio is 2.0, out of range; give it a number from 0 to 1"),
    "report": ("report none", "none: cannot be read: No such file or directory; give the path of a plan file"),
    "compare": ("compare . .", "holds no stats.jsonl, so nothing trained there; train with options={'dump': DIR}"),
    "ratios": ("choose bad_targets:number --ratios a,b", "--ratios 'a,b' is not a list of numbers; write for instance"),
    "out of range": ("choose bad_targets:number --ratios 3", "ratios is 3.0, out of range; give it a number from 0"),
    "worse": ("choose bad_targets:number --tolerance -1", "tolerance is -1.0, out of range; give it how much worse"),
    "damage": ("doctor bad_targets:model --tolerance -2", "tolerance is -2.0, out of range; give it a damage above 0"),
    "formats": ("doctor bad_targets:model --formats e9", f"formats: unknown format 'e9'; {FORMAT_NAMES}"),
    "latency": ("predict plan.json --latency 2h", "time '2h' is not understood; write for instance 0.2ms"),
    "step": ("predict plan.json --step 0ms", "--step is 0ms; give the time that a rank computes in a step, such as"),
    "forward": ("predict forward.json", "forward.json: has no gradients of parameters to exchange; give the plan of"),
    "world": ("predict plan.json --world 0", "world size 0 is not a number of ranks; give at least 1"),
    "gpu": ("predict plan.json --gpu h999", "--gpu h999: no figures; there are"),
    "top": ("minify a:b --top 0", "--top is 0; give at least 1"),
    "lowering": ("minify a:b --lowering cuda", f"unknown lowering 'cuda'; allowed: {LOWERINGS}"),
}


def told(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command, run beside a plan file, says on standard error; its exit code is 2."""
    targets: Any = types.ModuleType("bad_targets")
    targets.number, targets.raises = lambda: 3, lambda: 1 / 0
    targets.model = lambda: (net(), torch.ones(2, 4))
    monkeypatch.setitem(sys.modules, "bad_targets", targets)
    Path("plan.json").write_text(plan())
    fxprec.Plan().save("forward.json")
    assert exit_code(*command.split()) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("command", "words"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_says_so_in_one_line(
    command: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    f"doctor a:b --seed {10**20}": "Invalid value for '--seed'",
    f"minify a:b --seed {10**20}": "Invalid value for '--seed'",
    "demo --seed -1": "Invalid value for '--seed'",
}


@pytest.mark.parametrize(("command", "words"), USAGE.items())
def test_a_command_line_that_is_none_shows_its_usage(
    command: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = told(command, monkeypatch, capsys)
    assert words in found
    assert "--help" in found
