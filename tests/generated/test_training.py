"""Whole training steps with generated kernels in Triton's interpreter: the reference's numbers, its faults, its files.

Run in a process of its own.
"""

from __future__ import annotations

import ast
import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from backend_helpers import Cnn, mlp
from interpreted import interpreted
from models import Apply, Parts
from steps import losses_of
from torch import Tensor, nn

import fxprec
from fxprec import Backend, Config, compat
from fxprec.driver.lowering import Lowering
from fxprec.numerics import ahead, device
from fxprec.numerics.formats import Format

pytestmark = interpreted


class Block(nn.Module):
    """(batch, tokens, 16) to the same: layer norm, attention, RMS norm, GELU, residual adds; eight GEMMs."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        share = (q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5).softmax(-1)
        x = x + self.out((share @ v).transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


def train(make, batches: list[Tensor], lowering: str, **options) -> tuple[list[Tensor], Backend]:
    """Parameters and losses after a step for each batch, from the same start."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, backend = make(), Backend(Config(**{"recipe": "hfp8", "lowering": lowering, **options}))
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = losses_of(compiled, optimizer, batches)
    return [*losses, *(p.detach() for p in model.parameters()), *model.buffers()], backend


def batches(*shape: int, sizes: tuple[int, ...] = (4, 4)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, *shape, generator=generator) for size in sizes]


def assert_close_training(make, data: list[Tensor], **options) -> Backend:
    """Numbers but for the order of sums."""
    found, backend = train(make, data, "triton", **options)
    for got, right in zip(found, train(make, data, "eager", **options)[0], strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6)
    return backend


def assert_same_training(make, data: list[Tensor], **options) -> Backend:
    """Equal bits, statistics among them, and kernels that did it."""
    found, backend = train(make, data, "triton", **options)
    wanted, reference = train(make, data, "eager", **{k: v for k, v in options.items() if k not in ("verify", "dump")})
    assert not [e for e in backend.events if e.kind == "fallback"]
    for got, right in zip(found, wanted, strict=True):
        assert torch.equal(got, right)
    for got, right in zip(backend.stats(), reference.stats(), strict=True):
        same = ("site", "overflow_ratio", "underflow_ratio", "amax", "scale_exponent")
        assert [got[k] for k in same] == [right[k] for k in same]
    return backend


def test_a_perceptron_in_packed_storage_with_a_growing_batch(tmp_path: Path) -> None:
    """The third batch makes the graph dynamic, and is not a multiple of anything."""
    backend = assert_same_training(mlp, batches(16, sizes=(8, 8, 11)), storage="packed", dump=tmp_path)
    assert len(backend.plans) == 2
    kernels = json.loads((tmp_path / "graph-1" / "kernels" / "backward.json").read_text())["kernels"]
    assert any("s" in str(kernel["bytes"]) for kernel in kernels), "bytes moved depend on the batch"


def test_a_convolutional_network_with_batch_norm() -> None:
    assert_same_training(Cnn, batches(3, 6, 6, sizes=(2,)), storage="packed")


def test_storage_simulate_reads_formats_from_the_table() -> None:
    assert_same_training(mlp, batches(16, sizes=(4,)), storage="simulate")


def test_a_transformer_block_passes_its_own_check() -> None:
    """Functions and row sums are not ATen's to the bit; at this size no rounding shows it."""
    assert_same_training(Block, batches(6, 16, sizes=(2,)), recipe="fp8", storage="native", verify=True)


@pytest.mark.parametrize("storage", ["simulate", "packed"])
def test_a_single_row_has_kernels(storage: str) -> None:
    """Along a dimension of one element a kernel needs addresses for its whole block; such kernels did not compile."""

    def head() -> nn.Module:
        last = Parts(lambda m, y: y * m.last(y) + m.last(y).mean(), last=nn.Linear(16, 1))
        norm = nn.LayerNorm(16, elementwise_affine=False)
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), norm, last)

    backend = assert_close_training(head, batches(16, sizes=(1,)), storage=storage)
    assert not [e for e in backend.events if e.kind == "fallback"]


def test_verifying_draws_the_dropout_of_the_reference() -> None:
    """The reference ran first, so the kernel's dropout was the next one: a correct kernel was dropped."""
    make = partial(nn.Sequential, nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
    _, backend = train(make, batches(16, sizes=(64,)), "triton", storage="packed", verify=True)
    assert not [e for e in backend.events if e.kind == "fallback"]


def test_sources_are_readable_deterministic_and_quoted(tmp_path: Path) -> None:
    """A module's name may hold anything but a dot: it must not leave its comment."""
    name = "weird'\"\n    import os #"

    def odd() -> nn.Module:
        parts = nn.Sequential()
        parts.add_module(name, nn.Tanh())
        return nn.Sequential(nn.Linear(16, 16), parts, Apply(lambda x: x * 2))

    texts = []
    for run in ("one", "two"):
        train(odd, batches(16, sizes=(4,)), "triton", storage="packed", dump=tmp_path / run)
        files = sorted((tmp_path / run / "graph-0" / "kernels").iterdir())
        texts.append([(f.name, f.read_text()) for f in files])
    assert texts[0] == texts[1]
    sources = {file: text for file, text in texts[0] if file.endswith(".py")}
    assert any("weird" in text for file, text in sources.items() if file.startswith("forward"))
    for text in sources.values():
        head = text[: text.index("import triton\n")]
        assert all(line.startswith("# ") for line in head.splitlines())
        assert {"groups:", "bytes"} <= {line.split()[1] for line in head.splitlines()}
        imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import)]
        assert [a.name for n in imports for a in n.names] == ["triton", "triton.language"]


def spoil(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Make every encoder of 1-4-3 wrong."""
    encoder = device.encoder_source

    def spoilt(fmt: Format) -> tuple[str, str]:
        name, source = encoder(fmt)
        assert old in source
        return (name + "_spoilt", source.replace(name, name + "_spoilt").replace(old, new))

    monkeypatch.setattr(device, "encoder_source", lambda fmt: spoilt(fmt) if fmt.name == "1-4-3+4" else encoder(fmt))


FAULTS = {
    "wrong": ("return t", "return 1 - t", {"verify": True}, "codes of|differ from the reference's"),
    "broken": ("tl.minimum(", "tl.no_such_function(", {}, "does not run: .*no_such_function"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_kernel_that_fails_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The step it failed in is right already; the next is lowered without it."""
    old, new, options, words = FAULTS[kind]
    data = batches(16, sizes=(8, 8))
    wanted, _ = train(mlp, data, "eager", storage="packed")
    spoil(monkeypatch, old, new)
    with pytest.warns(fxprec.FxprecWarning, match=rf"^kernel fxprec_flat_\w+: .*({words})") as caught:
        found, backend = train(mlp, data, "triton", storage="packed", **options)
    assert all("Inductor compiles its casts" in str(w.message) for w in caught)
    for got, right in zip(found, wanted, strict=True):
        assert torch.equal(got, right)
    fallbacks = [e.site for e in backend.events if e.kind == "fallback"]
    assert fallbacks == list(dict.fromkeys(fallbacks)), "each is told once"
    assert [e.kind for e in backend.events if e.kind == "relowering"] == ["relowering"]
    with pytest.raises(fxprec.FallbackError, match=r"^kernel fxprec_flat_\w+"):
        train(mlp, data[:1], "triton", storage="packed", strict=True, **options)


def test_a_kernel_that_does_not_compile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Inductor would raise it on a GPU: the graph is built a second time, without that kernel only."""
    told, builds = [], []

    def build(gm):
        builds.append([n for n in gm.graph.nodes if n.target is compat.TritonCalls.target])
        if len(builds) == 1:
            raise RuntimeError("ptxas: out of registers\nlong story")
        return lambda args: None

    def why(source: str, name: str, *args: object) -> str | None:
        return "it does not compile: out of registers" if "relu" in name else None

    from generated.kernel_helpers import lower_half, two_casts

    monkeypatch.setattr(ahead, "why_not_generated", why)
    lowering = Lowering(Config(lowering="triton", recipe="hfp8"), torch.device("cpu"), told.append)
    half = lowering.compile(two_casts(), lower_half, build)
    assert [len(calls) for calls in builds] == [2, 1]
    assert [n.detail.split(";")[0] for n in told] == ["it does not compile: out of registers"]
    assert half.lowered.rows == (1, 0), "statistics of the site left out come from elsewhere"


def test_what_a_machine_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    assert compat.no_triton(torch.device("cpu")) is None
    assert "TRITON_INTERPRET=1 keeps" in (compat.no_triton(torch.device("cuda")) or "")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert compat.no_triton(torch.device("cuda")) == "compute capability 7.5 is below 8.0"
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert compat.no_triton(torch.device("cuda")) == "Triton 3.5.1 is older than 3.6"
