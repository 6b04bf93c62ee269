"""torch's own functions are replaced while fxprec compiles and no longer; a private name that is gone costs no import."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.ao.quantization.fx._decomposed
from torch import Tensor, nn
from torch._inductor import scheduler
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen import cpp
from torch._inductor.codegen.triton import TritonKernel

from fxprec import compat
from fxprec.compat.patches import optional, replaced
from fxprec.errors import FxprecWarning


class Parent:
    @staticmethod
    def name() -> str:
        return "torch's"


class Child(Parent):
    pass


@pytest.mark.parametrize("owner", [Parent, Child])
def test_contexts_of_two_threads_end_in_either_order(owner: type[Parent]) -> None:
    own = vars(owner).get("name")
    first = replaced(owner, "name", lambda old: lambda: f"first({old()})")
    second = replaced(owner, "name", lambda old: lambda: f"second({old()})")
    first.__enter__()
    second.__enter__()
    assert owner().name() == "second(first(torch's))"
    first.__exit__(None, None, None)
    assert owner.name() == "second(first(torch's))"
    second.__exit__(None, None, None)
    assert owner.name() == "torch's"
    assert vars(owner).get("name") is own


BEGIN = """
import gc, warnings
import torch, torch._dynamo.convert_frame as frames
from torch._functorch._aot_autograd import autograd_cache

def owners():
    entry = vars(autograd_cache.AOTAutogradCache)["make_entry"].__func__
    found = (frames.ConvertFrameAssert.__call__, frames.exceeds_recompile_limit, entry)
    return {f.__module__.split(".")[0] for f in found}

def step(**how):
    model = torch.nn.Linear(4, 4)
    compiled = torch.compile(model, **how)
    compiled(torch.ones(2, 4)).sum().backward()
    return compiled

options = {"recipe": "fp8", "lowering": "eager"}
"""


def said(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "how",
    ["backend='fxprec', options=options", "backend=fxprec.Backend(fxprec.Config.from_options(options))"],
    ids=["by name", "an instance"],
)
def test_dynamo_is_its_own_until_fxprec_compiles_and_afterwards(how: str) -> None:
    lines = said(f"""
import fxprec, fxprec.driver, fxprec.driver.backend, fxprec.driver.named
step(backend="aot_eager")
print(owners())
compiled = step({how})
print(sorted(owners()))
del compiled
torch.compiler.reset()
gc.collect()
print(owners())
compiled = torch.compile(torch.nn.Linear(4, 4), {how})
print(sorted(owners()))
""")
    assert lines == ["{'torch'}", "['fxprec', 'torch']", "{'torch'}", "['fxprec', 'torch']"]


def test_what_another_library_put_on_top_stays() -> None:
    assert said("""
compiled = step(backend="fxprec", options=options)
ours = frames.ConvertFrameAssert.__call__
theirs = frames.ConvertFrameAssert.__call__ = lambda self, *args, **kwargs: ours(self, *args, **kwargs)
del compiled
torch.compiler.reset()
gc.collect()
print(frames.ConvertFrameAssert.__call__ is theirs, frames.exceeds_recompile_limit.__module__)
step(backend="aot_eager")
""") == ["True torch._dynamo.cache_size"]


STEP = "step(backend='fxprec', options={**options, 'lowering': 'inductor'})"


@pytest.mark.parametrize(
    ("name", "use", "lost"),
    [
        ("autograd_cache.AOTAutogradCache.make_entry", STEP, "no compiled graph is stored"),
        (
            "torch._dynamo.eval_frame._debug_get_cache_entry_list",
            "step(backend='fxprec', options=options)",
            "recompile limits count what all models compile",
        ),
        (
            "torch._inductor.async_compile.kernel_code_log",
            "with compat.loops_share_files(): pass",
            "C++ loops compile one to a file",
        ),
        (
            "torch._inductor.codegen.cpp.CppVecKernel._get_vec_load_line",
            "with compat.calls_in_loops(): pass",
            "loops over bytes for AVX2 are slower",
        ),
    ],
)
def test_a_private_name_that_is_gone_costs_a_warning_and_not_the_package(name: str, use: str, lost: str) -> None:
    lines = said(f"""
import torch._inductor.async_compile, torch._inductor.codegen.cpp
del {name}
import fxprec, fxprec.driver.named
from fxprec import compat
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always", fxprec.FxprecWarning)
    {use}
print(*[w.message for w in found], sep="\\n")
""")
    (told,) = lines
    assert told.startswith(f"torch {torch.__version__} lacks a private name that fxprec uses (")
    assert name.rpartition(".")[2] in told
    assert lost in told
    assert told.endswith("install a newer fxprec, or torch 2.11 to 2.15")


def test_what_the_body_raises_passes(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(AttributeError, match="of the body"), compat.tiles_for_bytes():
        raise AttributeError("of the body")
    assert not [w for w in recwarn if issubclass(w.category, FxprecWarning)]


def test_what_is_missing_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxprec.compat.patches._told", set())
    missing = optional("fxprec.compat.no_such", "patch", "nothing is lost")
    with pytest.warns(FxprecWarning, match=r"\(No module named 'fxprec.compat.no_such'\): nothing is lost"), missing():
        pass
    with missing():
        pass  # a warning is an error in these tests


@pytest.mark.parametrize(
    ("module", "name", "lost"),
    [
        ("torch._inductor.memory", "is_nonfreeable_buffers", "a gradient that backward receives may be freed late"),
        ("torch._inductor.fx_passes.post_grad", "should_prefer_unfused_addmm", "a product may wait for what it is add"),
    ],
)
def test_an_order_without_a_private_name_is_kept_by_the_others(
    module: str, name: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxprec.compat.patches._told", set())
    monkeypatch.delattr(f"{module}.{name}")
    with pytest.warns(FxprecWarning, match=rf"{name}\): {lost}"), compat.saving_memory(lambda *_: None, "key"):
        assert torch._inductor.config.allow_buffer_reuse is False


def _patched() -> list[tuple[Any, str, Callable[[], AbstractContextManager[None]]]]:
    """Return owner, name and patch of each function of Inductor's that is replaced in this torch."""
    fusion: list[tuple[Any, str, Callable[[], AbstractContextManager[None]]]] = (
        [(scheduler.FusedMixOrderReductions, "can_fuse_with", partial(compat.only_tensors_are_loads, scaled=True))]
        if getattr(torch._inductor.config.triton, "mix_order_reduction_max_reads", 0)  # since torch 2.13
        else []
    )
    return [
        *fusion,
        (cpp.CppVecKernel, "_get_vec_load_line", compat.calls_in_loops),
        (cpp.CppVecKernel, "get_to_dtype_expr", compat.calls_in_loops),
        (cpp.CppVecOverrides, "to_dtype_bitcast", compat.bitcasts_in_loops),
        (cpp.TilingSelect, "select_tiling", compat.tiles_for_bytes),
        (AsyncCompile, "cpp_pybinding", compat.loops_share_files),
        (AsyncCompile, "wait", compat.loops_share_files),
        (TritonKernel, "load", compat.constant_places_are_arguments),
    ]


@pytest.mark.parametrize(("owner", "name", "patch"), _patched(), ids=[name for _, name, _ in _patched()])
def test_what_takes_the_place_of_torchs_function_takes_all_that_it_takes(
    owner: Any, name: str, patch: Callable[[], AbstractContextManager[None]]
) -> None:
    """By position and by name, and one more argument, which another torch may have."""
    signed = cpp.CppOverrides if owner is cpp.CppVecOverrides else owner  # whose functions for vectors take anything
    names = list(inspect.signature(getattr(signed, name)).parameters)
    before = vars(owner)[name]
    with patch():
        assert vars(owner)[name] is not before
        replaced = inspect.signature(getattr(owner, name))
        replaced.bind(*names)
        replaced.bind(**{word: word for word in names if word != "self"} | ({"self": 0} if "self" in names else {}))
        replaced.bind(*names, one_more=0)
    assert vars(owner)[name] is before


class Quantized(nn.Module):
    """Activations in 8 bits as quantization-aware training of PT2E writes them, which Inductor rounds to integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("scale", torch.tensor(0.05))
        self.register_buffer("zero", torch.tensor(128))

    def forward(self, x: Tensor) -> Tensor:
        ops = torch.ops.quantized_decomposed
        codes = ops.quantize_per_tensor.tensor(x, self.scale, self.zero, 0, 255, torch.uint8)
        return self.layer(ops.dequantize_per_tensor.tensor(codes, self.scale, self.zero, 0, 255, torch.uint8))


@pytest.mark.filterwarnings("ignore:dynamo_pgo")
def test_a_graph_that_rounds_to_integers_compiles() -> None:
    model, x = Quantized(), torch.randn(32, 64)
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        found = torch.compile(model, backend="fxprec", options={"recipe": "fp8"})(x)
        assert torch.equal(found, model(x))
