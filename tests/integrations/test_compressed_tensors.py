"""Export of forward formats to compressed-tensors, its import, and an exported forward computed by plain torch."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import compiled, eager_backend
from torch import Tensor, nn
from torch.nn import functional as F

import fxprec
from fxprec import Operands, Recipe, cli
from fxprec.config.recipes import MXFP8, NVFP4
from fxprec.errors import ConfigError, PlanError
from fxprec.integrations import from_compressed_tensors, to_compressed_tensors
from fxprec.passes import narrow_gemms

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(keep_high pattern .head. changes nothing|low_ratio 1 is not reached)"  # fp8's, said as they should be
)
WIDTH, TOKENS, VOCABULARY = 64, 32, 48
FORMATS = {"fp8": "float-quantized", "mxfp8": "mxfp8-quantized", "nvfp4": "nvfp4-pack-quantized"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.log_softmax(self.head(x), -1)


LAYERS = [f"blocks.{i}.{name}" for i in range(2) for name in ("qkv", "out", "up", "down")]


def tokens(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(seed))


def trained(recipe: Any, **options: Any) -> tuple[Transformer, fxprec.Backend, Callable[[Tensor], Tensor]]:
    """Train four steps; return the model, its backend, and what was compiled."""
    model, backend = Transformer(), eager_backend(recipe, keep_high=("head",), **options)
    step = compiled(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for i in range(4):
        out = step(tokens(i))
        F.nll_loss(out[:, :-1].flatten(0, 1), tokens(i)[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, backend, step


# An exported forward, by the config alone.


def served(
    model: Transformer,
    config: dict[str, Any],
    *,
    squares: bool = False,
    round_as: Callable[[Tensor, dict[str, Any]], Tensor] | None = None,
) -> Transformer:
    """Return a copy whose layers multiply what the config says of their inputs and weights."""
    found, of = copy.deepcopy(model), round_as or rounded
    for group in config["config_groups"].values():
        for name in group["targets"]:
            layer = found.get_submodule(name)
            inputs = group["input_activations"]
            weight = in_squares(layer.weight, group["weights"]) if squares else of(layer.weight, group["weights"])
            layer.weight = nn.Parameter(weight.detach())
            layer.register_forward_pre_hook(lambda _, args, inputs=inputs: (of(args[0].float(), inputs),))
    return found


def in_bf16(model: Transformer) -> Transformer:
    """Let each layer multiply bf16 operands, sum in float32 and round its result to bf16."""
    for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
        layer.bfloat16()
        layer.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
        layer.register_forward_hook(lambda _, args, out: out.float())
    return model


def rounded(x: Tensor, args: dict[str, Any]) -> Tensor:
    """Quantise and dequantise, plain torch: groups lie along the last dimension."""
    assert (args["type"], args["symmetric"]) == ("float", True)
    if args["strategy"] == "tensor":
        scale = x.abs().max() / 448
        return (x / scale).to(torch.float8_e4m3fn).float() * scale
    groups = x.unflatten(-1, (-1, args["group_size"]))
    return _by_scale(groups, groups.abs().amax(-1, keepdim=True), args, x).flatten(-2)


def in_squares(w: Tensor, args: dict[str, Any]) -> Tensor:
    """The same, with groups of each 16 rows sharing their scales: what the recipe nvfp4 does to weights."""
    squares = w.unflatten(0, (-1, 16)).unflatten(-1, (-1, 16))
    return _by_scale(squares, squares.abs().amax((1, 3), keepdim=True), args, w).flatten(2).flatten(0, 1)


def _by_scale(x: Tensor, amax: Tensor, args: dict[str, Any], whole: Tensor) -> Tensor:
    largest = {8: 448.0, 4: 6.0}[args["num_bits"]]
    if args["strategy"] == "group":
        mantissa, exponent = torch.frexp(amax)
        top, bits = torch.frexp(torch.tensor(largest))
        scale = torch.ldexp(torch.ones_like(amax), exponent - bits + (mantissa > top))
        inverse = 1 / scale
    else:
        tensor = whole.abs().max() / (largest * 448)
        blocks = (amax / largest / tensor).clamp(max=448).to(torch.float8_e4m3fn).float()
        scale, inverse = blocks * tensor, 1 / tensor / blocks
    elements = (x * inverse).clamp(-largest, largest)
    return (_e2m1(elements) if args["num_bits"] == 4 else elements.to(torch.float8_e4m3fn).float()) * scale


_BETWEEN = ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0))
"""Middles between numbers of e2m1, and whether the middle goes up: to the even code."""


def _e2m1(x: Tensor) -> Tensor:
    a = x.abs()
    code = sum((a >= at if up else a > at).long() for at, up in _BETWEEN)
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code].copysign(x)


def log_probabilities(f: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        return f(tokens(9))


def plainly(model: nn.Module) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager_decomp_partition")


def forward_alone(operands: Operands) -> Recipe:
    """Nothing but the operands is rounded: sums and all else are float32."""
    return Recipe(name="test", hi="fp32", lo_forward="fp32", lo_backward="fp32", operands=operands)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("operands", "squares"), [(MXFP8.operands, False), (Operands(forward="nvfp4"), False), (NVFP4.operands, True)]
)
def test_the_exported_forward_is_the_trained_one_bit_for_bit(operands: Operands, squares: bool) -> None:
    model, backend, step = trained(forward_alone(operands))
    found = log_probabilities(step)
    config = to_compressed_tensors(backend.plans).config
    wanted = log_probabilities(plainly(served(model, config, squares=squares)))
    assert torch.equal(found, wanted)
    plain = log_probabilities(plainly(model))
    assert (found - plain).abs().max() > 0.005, "rounding is seen"


@pytest.mark.parametrize(
    ("recipe", "squares", "most"), [("mxfp8", False, 1e-4), ("nvfp4", True, 1e-4), ("fp8", False, 0.1)]
)
def test_an_engine_that_multiplies_in_bf16_agrees_within_a_bound(
    recipe: str, squares: bool, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp8 does not multiply codes on a CPU, so all of its rounding is in the bound."""
    monkeypatch.setattr(narrow_gemms, "SMALL", 0)  # products this small would stay float32 on a CPU
    model, backend, step = trained(recipe, **({"low_ratio": 1.0} if recipe == "fp8" else {}))
    config = to_compressed_tensors(backend.plans).config
    wanted = log_probabilities(in_bf16(served(model, config, squares=squares)))
    assert (log_probabilities(step) - wanted).abs().max() < most


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operands", [MXFP8.operands, Operands(forward="nvfp4")], ids=["mxfp8", "nvfp4"])
def test_the_package_rounds_what_the_config_names_as_the_training_did(operands: Operands) -> None:
    """Its scale of mxfp8 is this recipe's, rounded up; nvfp4's differs in the order of float32 products."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    model, backend, step = trained(forward_alone(operands))
    config = to_compressed_tensors(backend.plans).config
    found, plain = log_probabilities(step), log_probabilities(model)
    wanted = log_probabilities(served(model, config, round_as=by_package))
    assert (found - wanted).norm() < 0.001 * (found - plain).norm()


def by_package(x: Tensor, args: dict[str, Any]) -> Tensor:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

    said = QuantizationArgs.model_validate(args)
    whole = generate_gparam(*x.aminmax()) if args["strategy"] == "tensor_group" else None
    scale, zero = compute_dynamic_scales_and_zp(x, said, nn.Module(), whole)
    return fake_quantize(x, scale, zero, said, global_scale=whole)


@pytest.mark.parametrize("recipe", FORMATS)
def test_targets_are_the_rounded_layers_and_high_ones_are_ignored(recipe: str) -> None:
    _, backend, _ = trained(recipe, **({"low_ratio": 1.0} if recipe == "fp8" else {}))
    config = to_compressed_tensors(backend.plans).config
    (group,) = config["config_groups"].values()
    assert (group["targets"], config["ignore"]) == (LAYERS, ["head"])
    assert config["format"] == group["format"] == FORMATS[recipe]
    assert json.loads(json.dumps(config)) == config


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", FORMATS)
def test_the_package_reads_the_config_as_its_own_preset(recipe: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.format import infer_module_format

    model, backend, _ = trained(recipe, **({"low_ratio": 1.0} if recipe == "fp8" else {}))
    config = to_compressed_tensors(backend.plans).config
    read = quantization.QuantizationConfig.model_validate(config)
    (scheme,) = read.config_groups.values()
    if recipe != "fp8":  # whose preset wants scales of inputs from calibration
        preset = quantization.preset_name_to_scheme(recipe, LAYERS)
        for ours, theirs in ((scheme.weights, preset.weights), (scheme.input_activations, preset.input_activations)):
            for name in ("num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "scale_dtype"):
                assert getattr(ours, name) == getattr(theirs, name), name
    assert infer_module_format(nn.Linear, scheme).value == config["format"]
    quantization.apply_quantization_config(model, read)
    named = [n for n, m in model.named_modules() if getattr(m, "quantization_scheme", None) is not None]
    assert named == LAYERS


@pytest.mark.parametrize("recipe", FORMATS)
def test_an_imported_config_rounds_the_same_layers(recipe: str) -> None:
    _, backend, _ = trained(recipe, **({"low_ratio": 1.0} if recipe == "fp8" else {}))
    exported = to_compressed_tensors(backend.plans).config
    options = from_compressed_tensors(json.loads(json.dumps({"quantization_config": exported})), Transformer())
    assert options.pop("keep_high") == ("head",)
    again = eager_backend(keep_high=("head",), **options)
    compiled(Transformer(), again)(tokens(0)).sum().backward()
    assert to_compressed_tensors(again.plans).config == exported


def test_an_engines_usual_config_is_read() -> None:
    said = {
        "quant_method": "compressed-tensors",
        "config_groups": {"NVFP4": ["Linear"]},
        "ignore": ["head", r"re:.*\.qkv$"],
    }
    options = from_compressed_tensors(said, Transformer())
    assert options["recipe"].operands == Operands(forward="nvfp4")
    assert options["keep_high"] == ("blocks.0.qkv", "blocks.1.qkv", "head")
    assert from_compressed_tensors(said | {"ignore": ["head"]})["keep_high"] == ("head",)
    some = from_compressed_tensors(said | {"config_groups": {"NVFP4": [r"re:.*\.(up|down)$"]}}, Transformer())
    assert some["keep_high"] == ("blocks.0.qkv", "blocks.0.out", "blocks.1.qkv", "blocks.1.out", "head")
    with pytest.raises(ConfigError, match=r"names layers by 're:\.\*\\\\\.qkv\$'; give the model too"):
        from_compressed_tensors(said)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FP8_ARGS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
REFUSED = {
    "quant_method is 'gptq'": {"quant_method": "gptq"},
    "rounds weights and inputs as .*type int": {"config_groups": {"a": {"targets": ["Linear"], "weights": INT4}}},
    "group 'W4A16' rounds": {"config_groups": {"W4A16": ["Linear"]}},
    "have the formats MXFP8, NVFP4": {"config_groups": {"NVFP4": ["a"], "MXFP8": ["b"]}},
    r"names layers by 're:\(', which is not a regular expression: missing \)": {"ignore": ["re:("]},
    r"^ignore is 'lm_head'; give it a list of names of layers": {"ignore": "lm_head"},
    r"^ignore is \[3\]; give it a list": {"ignore": [3]},
    r"^targets of group 'NVFP4' is \[None\]; give": {"config_groups": {"NVFP4": [None]}},
    r"^targets of group 'g' is None; give": {
        "config_groups": {"g": {"weights": FP8_ARGS, "input_activations": FP8_ARGS}}
    },
    r"^group 'g' is 3; give it an object": {"config_groups": {"g": 3}},
    r"rounds weights and inputs as \('3', 'nothing'\); a rec": {"config_groups": {"g": {"targets": [], "weights": 3}}},
    r"^quant_method is None; give it a config of": {"quantization_config": None},
    "rounds a KV cache": {"kv_cache_scheme": {"num_bits": 8}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_config_that_no_recipe_expresses_is_refused(message: str) -> None:
    said = {"quant_method": "compressed-tensors", "config_groups": {"NVFP4": ["Linear"]}} | REFUSED[message]
    with pytest.raises(ConfigError, match=message) as caught:
        from_compressed_tensors(said, Transformer())
    assert "\n" not in str(caught.value)


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self.weight)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x), self.layer.weight)


def planned(model: nn.Module, recipe: Any, **options: Any) -> list[fxprec.Plan]:
    backend = eager_backend(recipe, **options)
    compiled(model, backend)(torch.randn(2, 32, 32)).sum().backward()
    return backend.plans


@pytest.mark.parametrize(
    ("model", "recipe", "options", "message"),
    [
        (nn.Sequential(nn.Linear(32, 32)), "bf16", {}, r"'bf16' rounds no operands of a forward product"),
        (nn.Sequential(Batched()), "mxfp8", {}, r"is aten.bmm in .*, and a config can name linear layers only"),
        (Twice(), "mxfp8", {}, r"outside of every module"),
        (nn.Sequential(nn.Linear(32, 32)), "hfp8", {"low_ratio": 1.0, "storage": "packed"}, r"1-4-3\+4, which a config cannot name"),
        (nn.Sequential(nn.Linear(32, 32)), "fp8", {"low_ratio": 1.0, "storage": "simulate"}, r"rounds every tensor"),
        (
            nn.Sequential(nn.Linear(32, 32)),
            forward_alone(Operands(forward="mxfp6")),
            {"low_ratio": None},
            r"^0 multiplies in mxfp6_e2m3, which a config cannot name; use one of e4m3fn, ",
        ),
    ],
)  # fmt: skip
def test_what_no_config_expresses_is_refused_in_one_line(model: Any, recipe: Any, options: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        to_compressed_tensors(planned(model, recipe, **options))
    assert "\n" not in str(caught.value)


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    return int(str(ended.value.code))


def test_the_command_exports_a_factory_and_its_plan_alike(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text(
        "import torch\ndef make():\n    print('loading')\n    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)), "
        "torch.ones(32, 32)\n"
    )
    assert not run("export", "t.py:make", "--recipe", "nvfp4", "--keep-high", "1")
    printed = capsys.readouterr()
    assert json.loads(printed.out)["ignore"] == ["1"]
    assert "an engine needs one from calibration" in printed.err
    assert not run("dump", "t.py:make", "--recipe", "nvfp4", "--keep-high", "1", "--out", "dumped")
    capsys.readouterr()
    assert not run("export", "dumped", "--out", "config.json")
    assert capsys.readouterr().out == "config.json\n"
    assert json.loads(Path("config.json").read_text()) == json.loads(printed.out)
    for option in (("--low-ratio", "0.5"), ("--recipe", "fp8")):
        assert run("export", "dumped", *option) == 2
        words = "--recipe, --keep-high and --low-ratio plan a factory, and dumped has its plan; leave them out"
        assert words in capsys.readouterr().err
    assert run("export", "t.py:make", "--to", "gguf") == 2
    assert "--to is 'gguf'" in capsys.readouterr().err
