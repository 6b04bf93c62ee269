"""Bad input: each mistake arrives through Dynamo as its own type, in one line that names the way out."""

from __future__ import annotations

import json
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_helpers import Cnn, eager_backend, mlp
from models import Apply
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxprec
from fxprec import compat
from fxprec.driver import capture, option_checks
from fxprec.driver.interpreter import interpreted


def compile_and_run(model: nn.Module | None = None, x: torch.Tensor | None = None, **options) -> fxprec.Backend:
    compiled = torch.compile(model or mlp(), backend="fxprec", options={"lowering": "eager", **options})
    out = compiled(torch.randn(8, 16) if x is None else x)
    out.square().mean().backward()
    return fxprec.backend_of(compiled)


def assert_refused(kind: type[Exception], words: str, **options) -> None:
    with pytest.raises(kind, match=words) as caught:
        compile_and_run(**options)
    assert isinstance(caught.value, fxprec.FxprecError)
    assert "\n" not in str(caught.value), "one line: the thing, the cause, the way out"
    files = [Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files[-1] in ("named.py", "backend.py")
    assert not {"symbolic_convert.py", "output_graph.py"} & set(files), "the user's frames, not Dynamo's"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipee": "fp8"}, r"^unknown option 'recipee'; did you mean 'recipe'\?"),
        (
            {"peak_buget": "5GB"},
            r"did you mean 'peak_budget'\?.*; torch\.compile and fxprec\.Backend also take optimizer and step_budget",
        ),
        ({"recipe": "FP8"}, r"^unknown recipe 'FP8'; did you mean 'fp8'\?"),
        ({"peak_budget": 0.5}, r"^peak_budget is 0.5; give it .* or a share, as text such as '60%'$"),
        ({"recipe": "hfp8", "storage": "native"}, r"torch has no dtype for 1-6-9.*use storage='packed'"),
    ],
)
def test_options_are_refused_in_words(options, words: str) -> None:
    assert_refused(fxprec.ConfigError, words, **options)


def test_a_wrong_option_is_told_before_the_first_call_where_the_backend_is_asked_for() -> None:
    compiled = torch.compile(mlp(), backend="fxprec", options={"recipie": "fp8"})
    with pytest.raises(fxprec.ConfigError, match=r"^unknown option 'recipie'; did you mean 'recipe'\?"):
        fxprec.backend_of(compiled)


def test_a_warning_names_the_users_line() -> None:
    with pytest.warns(fxprec.FxprecWarning, match=r"keep_high pattern 'nowhere' matches no module") as told:
        compile_and_run(recipe="fp8", keep_high=("nowhere",))
    (warning,) = (w for w in told if "nowhere" in str(w.message))
    line = Path(warning.filename).read_text().splitlines()[warning.lineno - 1]
    assert (warning.filename, line.strip()) == (__file__, "out = compiled(torch.randn(8, 16) if x is None else x)")


def test_options_are_no_config() -> None:
    with pytest.raises(fxprec.ConfigError, match=r"give fxprec.Backend a fxprec.Config\(\.\.\.\) of these options"):
        fxprec.Backend({"recipe": "fp8"})  # type: ignore[arg-type]
    with pytest.raises(
        fxprec.ConfigError, match=r"^fxprec.Backend has no argument 'recipe'; options belong to the con"
    ):
        fxprec.Backend(recipe="fp8")


def test_an_impossible_budget_names_the_least_possible() -> None:
    words = (
        r"^activation_budget is 10 bytes, but with recipe 'fp8' and policy 'size' what is saved for backward takes at "
        r"least \d.* bytes; raise the budget to that"
    )
    assert_refused(fxprec.BudgetError, words, recipe="fp8", activation_budget=10)


def test_a_mode_sets_inductors_config_while_it_compiles(monkeypatch) -> None:
    from torch._inductor import config

    seen = []

    def compile_nothing(gm, examples, **options):
        seen.append((config.triton.cudagraphs, bool(options["cudagraphs"]), config.max_autotune))
        return interpreted(gm)

    monkeypatch.setattr(fxprec.compat, "compile_fx_inner", compile_nothing)
    monkeypatch.setattr(option_checks, "_WITHOUT_CUDA_GRAPHS", {})  # as on a GPU
    for kwargs in ({"mode": "reduce-overhead"}, {"options": {"mode": "max-autotune-no-cudagraphs"}}, {}):
        torch.compiler.reset()
        compiled = torch.compile(mlp(), backend="fxprec", **kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no bf16 GEMM, on some CPUs
            compiled(torch.ones(8, 16)).sum().backward()
    assert seen == [(True, True, False)] * 2 + [(False, False, True)] * 2 + [(False, False, False)] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "fast"}, r"^unknown mode 'fast'; allowed: 'default', 'reduce-overhead'"),
        ({"mode": "max-autotune", "lowering": "eager"}, r"^mode='max-autotune' tunes Inductor, which lowering='eager'"),
    ],
)
def test_modes_that_mean_nothing_are_refused(options, words: str) -> None:
    assert_refused(fxprec.ConfigError, words, **options)


def test_a_plan_of_another_model_names_the_first_difference(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    compile_and_run(recipe="hfp8").plans[0].save(path)
    torch.compiler.reset()
    other = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4))
    words = r"belongs to another model: .*tanh.*relu.*; drop plan= to plan again"
    assert_refused(fxprec.PlanError, words, model=other, recipe="hfp8", plan=str(path))
    torch.compiler.reset()
    words = r"^the plan has 4 groups, this graph 2: it belongs to another model; drop plan="
    assert_refused(fxprec.PlanError, words, model=nn.Linear(16, 4), recipe="hfp8", plan=str(path))


def test_a_plan_of_the_same_model_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved = compile_and_run(recipe="hfp8", low_ratio=0.4, policy="size-ascending").plans[0]
    saved.save(path)
    torch.compiler.reset()
    followed = compile_and_run(recipe="hfp8", plan=str(path)).plans[0]
    assert followed.formats == saved.formats
    assert followed.low_groups == saved.low_groups != frozenset(range(4))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", r"plan\.json"),
        (b"\x80\x04\x95", r"plan\.json"),
        (b'{"schema": 99}', r"plan\.json"),
        (json.dumps({"schema": 1, "sites": "os.system('true')"}).encode(), r"plan\.json"),
    ],
)
def test_a_corrupt_plan_file_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert_refused(fxprec.PlanError, words, recipe="hfp8", plan=str(path))


def test_a_missing_plan_file_is_refused(tmp_path: Path) -> None:
    assert_refused(fxprec.PlanError, r"none\.json: cannot be read: No such file", plan=str(tmp_path / "none.json"))


def test_a_float64_model_is_refused_with_tensor_module_and_line() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 4)
            self.gain = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.gain

    words = (
        r"gain \(.*test_backend_errors\.py:\d+\) is float64: fxprec holds float32, bfloat16 and float16 only; convert "
        r"the model with \.float\(\), or"
    )
    assert_refused(fxprec.LoweringError, words, model=Inside(), recipe="hfp8")
    torch.compiler.reset()
    with pytest.raises(fxprec.LoweringError, match=r"is float64"):
        compile_and_run(model=mlp().double(), x=torch.randn(8, 16, dtype=torch.float64), recipe="hfp8")


def test_a_float64_parameter_of_no_module_is_named() -> None:
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    backend = fxprec.Backend(fxprec.Config(recipe="fp32", lowering="eager"))
    with pytest.raises(fxprec.LoweringError, match=r"^weight \(.*\) is float64"):
        torch.compile(lambda x: (x @ weight).sum(), backend=backend)(torch.ones(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("recipe", ["bf16", "hfp8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_batch_that_torch_refuses_is_named_with_its_own_dtype(dtype: torch.dtype, recipe: str) -> None:
    """torch names the 16 bits that fxprec, or autocast, gave the weight: "Double and BFloat16"."""
    name = str(dtype).removeprefix("torch.")
    words = (
        rf"^args\.0 \(0\) is {name}, and a matrix product multiplies it with float32: .*; convert it with "
        r"\.to\(torch\.float32\)$"
    )
    model, x = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), torch.ones(8, 16, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxprec.FxprecWarning)
        assert_refused(fxprec.LoweringError, words, model=model, x=x, recipe=recipe)


def between(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Apply(function), nn.Linear(8, 4))


IN_FLOAT64 = {
    "values": lambda h: h.double().mul(2.0 + 2.0**-40).float(),
    "statistic": lambda h: h / (1 + h.double().var(-1, keepdim=True)).float(),
    "constant": lambda h: h * torch.linspace(0, 1, 8, dtype=torch.float64).float(),
    "gemm": lambda h: (h.double() @ torch.eye(8, dtype=torch.float64)).float(),
}


def test_a_float64_tensor_inside_of_an_operator_is_no_warning() -> None:
    """A range with a floating end counts its steps in float64."""
    model = between(lambda h: h * torch.arange(8.0).sin())
    compile_and_run(model=model, x=torch.randn(16, 8), recipe="bf16", strict=True)


def test_a_float64_input_is_left_alone_with_a_warning() -> None:
    model = between(lambda h: h)
    step = torch.compile(lambda x: model(x.float()), backend=eager_backend("native", recipe="bf16", low_ratio=None))
    with pytest.warns(fxprec.FxprecWarning, match=r"^x: is torch\.float64: float64 values are not planned"):
        step(torch.randn(16, 8, dtype=torch.float64)).sum().backward()


@pytest.mark.parametrize("storage", ["native", "simulate"])
@pytest.mark.parametrize("function", IN_FLOAT64.values(), ids=IN_FLOAT64)
def test_a_float64_tensor_between_others_is_left_alone_with_a_warning(function: Any, storage: str) -> None:
    model, x, backend = between(function), torch.randn(16, 8), eager_backend(storage, recipe="bf16", low_ratio=None)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    words = (
        r"^\w+, 1, test_backend_errors\.py:\d+: is torch\.float64: float64 values are not planned and keep their "
        r"precision"
    )
    with pytest.warns(fxprec.FxprecWarning, match=words):
        out = torch.compile(model, backend=backend)(x)
    found = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    assert all((a - b).norm() < 0.02 * b.norm() for a, b in zip(found, wanted, strict=True))
    assert backend.plans[0].sites
    assert_refused(fxprec.FallbackError, "is torch.float64", model=model, x=x, recipe="bf16", strict=True)


def test_a_float64_scalar_is_left_alone() -> None:
    scale = torch.tensor(1.0 + 2.0**-40, dtype=torch.float64)
    compiled = torch.compile(lambda x: (x * 2).sum() * scale, backend=eager_backend("simulate"))
    found = compiled(torch.ones(4))
    assert (found.item(), found.dtype) == (8.0 + 8 * 2.0**-40, torch.float64)


def test_an_unsupported_device_is_refused() -> None:
    model, x = mlp().to("meta"), torch.randn(8, 16, device="meta")
    words = r"^device 'meta': fxprec lowers to cpu and cuda only; move the model there or compile"
    assert_refused(fxprec.LoweringError, words, model=model, x=x)


GPU = r"device 'cuda:0'"


@pytest.mark.parametrize(
    ("hip", "capability", "words"),
    [
        ("6.4", (9, 4), rf"^{GPU} is AMD's \(ROCm 6\.4\): fxprec's code is for NVIDIA's GPUs; compile this part with"),
        (
            None,
            (7, 5),
            rf"^{GPU} has compute capability 7\.5: fxprec's code needs 8\.0, for bfloat16; compile this part",
        ),
    ],
)
def test_a_gpu_without_code_is_refused(
    hip: str | None, capability: tuple[int, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    with FakeTensorMode():
        examples = [torch.empty(2, device="cuda:0")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(fxprec.LoweringError, match=words) as caught:
        capture._device(examples)
    assert "\n" not in str(caught.value)
    if hip is None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert capture._device([torch.empty(2), *examples]) == torch.device("cuda:0")


def test_a_graph_on_two_gpus_is_refused() -> None:
    """The table lay on one of them, by the order of a set."""
    with FakeTensorMode():
        examples = [torch.empty(2, device=device) for device in ("cuda:1", "cpu", "cuda:0")]
    words = r"^a graph has inputs on cuda:0 and cuda:1: .*on one GPU; compile the part on each GPU separately"
    with pytest.raises(fxprec.LoweringError, match=words):
        capture._device(examples)


def test_triton_without_its_interpreter_is_a_fallback_on_a_cpu() -> None:
    words = r"^lowering='triton': a CPU runs Triton kernels in Triton's interpreter only.*; lowered as 'auto' instead"
    assert_refused(fxprec.FallbackError, words, lowering="triton", recipe="fp8", strict=True)


NO_LOW = fxprec.Recipe(hi="1-6-9", lo_forward="1-6-9", lo_backward="1-6-9")
FALLBACKS = [
    ({"recipe": NO_LOW, "low_ratio": 0.5}, "low_ratio 0.5 is not reached"),
    ({"recipe": "hfp8", "verify": True}, "verify=True: nothing is compared: lowering 'eager' on cpu is the reference"),
    ({"recipe": "hfp8", "keep_high": ("nowhere.*",)}, r"keep_high pattern 'nowhere\.\*' matches no module"),
]


@pytest.mark.parametrize(("options", "words"), FALLBACKS)
def test_a_fallback_is_a_warning_and_an_event(options, words: str) -> None:
    with pytest.warns(fxprec.FxprecWarning, match=words) as caught:
        backend = compile_and_run(**options)
    assert len(caught) == 1
    assert [e.kind for e in backend.events if e.kind != "scale"] == ["fallback"]


@pytest.mark.parametrize(("options", "words"), FALLBACKS)
def test_strict_makes_a_fallback_an_error(options, words: str) -> None:
    assert_refused(fxprec.FallbackError, words, strict=True, **options)


def test_a_state_of_another_model_is_refused() -> None:
    backend = compile_and_run(recipe="hfp8")
    torch.compiler.reset()
    other = compile_and_run(model=Cnn(), x=torch.randn(2, 3, 8, 8), recipe="hfp8")
    with pytest.raises(fxprec.PlanError, match="belongs to another model"):
        other.load_state_dict(backend.state_dict())
    with pytest.raises(fxprec.PlanError, match=r"pass what state_dict\(\) returned"):
        other.load_state_dict({"plans": []})


def test_a_gpu_without_8_bit_floats_stores_packed_codes_and_says_so(monkeypatch):
    """The same numbers and bytes: e4m3fn as integers."""
    why = "compute capability 8.0 has no casts to 8-bit floats"

    def train(**options):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, backend = mlp(), eager_backend("native", recipe="fp8", low_ratio=1.0, **options)
        torch.compile(model, backend=backend)(torch.ones(4, 16)).square().sum().backward()
        return [p.grad for p in model.parameters()], backend

    wanted, native = train()
    monkeypatch.setattr(fxprec.compat, "no_native_fp8", lambda device: why)
    with pytest.warns(fxprec.FxprecWarning, match=rf"^storage='native': {re.escape(why)}; stored as packed codes"):
        found, backend = train()
    for got, right in zip(found, wanted, strict=True):
        assert torch.equal(got, right)
    assert (native.plans[0].storage, backend.plans[0].storage) == ("native", "packed")
    assert backend.config.storage == "native", "what was asked for stays as it is"
    assert backend.plans[0].saved_bytes == native.plans[0].saved_bytes
    assert next(e.site for e in backend.events if e.kind == "fallback") == "storage='native'"
    with pytest.raises(fxprec.FallbackError, match=r"storage='native': compute capability 8\.0"):
        train(strict=True)
    torch.compiler.reset()
    backend = eager_backend("native", recipe="bf16", low_ratio=None)
    torch.compile(mlp(), backend=backend)(torch.ones(4, 16)).square().sum().backward()
    assert backend.plans[0].storage == "native", "bf16 has no 8-bit tensors"


@pytest.mark.skipif(
    compat.torch_version() >= (2, 14), reason="torch 2.14 leaves such a module uncompiled, which is told"
)
def test_onednns_own_layout_is_refused() -> None:
    """A copy of it failed in the kernel that allocates the copy."""
    words = r"has the layout torch\._mkldnn: .*call \.to_dense\(\) before"
    model, x = nn.Conv2d(4, 4, 3), torch.randn(2, 4, 8, 8).to_mkldnn()
    assert_refused(fxprec.errors.LoweringError, words, model=model, x=x, recipe="fp8")
