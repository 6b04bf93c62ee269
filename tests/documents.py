"""The Python blocks of README and docs run as tests, collected by Sybil.

A block that imports torch is a whole program. It runs as a reader pastes it, and must print what the next block shows.
Any other block gets those names of `Given` that it uses, and is compiled by the reference lowering. Blocks share
nothing, so workers may run them in any order.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.integration.pytest import SybilItem
from sybil.parsers.markdown import CodeBlockParser
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import fxprec

OPTIONAL = ("accelerate", "lightning", "tensorboard", "torchtitan", "transformers")
SLOW = ("arith", "doctor", "integrations", "loops")
"""Pages with a block that takes more than a second."""
NUMBER = re.compile(r"\d+(?:\.\d+)?")
NEXT_BLOCK = re.compile(r"(?s)[^`]*```\n(.*?)```")


class Net(nn.Module):
    """A network whose modules have the names that blocks ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), *(nn.Sequential(nn.GELU(), nn.Linear(32, 32)) for _ in range(6)))
        self.fc, self.head = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, input: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        outputs = self.head(self.fc(self.layers(input)))
        return outputs if target is None else {"loss": F.cross_entropy(outputs, target)}


class Given:
    """What blocks leave to the reader."""

    torch, nn, F, fxprec, distributed = torch, nn, F, fxprec, distributed
    DistributedDataParallel, triton, tl = DistributedDataParallel, triton, tl
    folder, step = "checkpoint", 1

    def __init__(self) -> None:
        self.x = self.batch = self.inputs = torch.randn(512, 8)
        self.a, self.b, self.u, self.v = torch.randn(8, 4), torch.randn(4, 8), torch.randn(8), torch.randn(8)
        self.target = torch.randint(4, (512,))
        self.data = [{"input": row, "target": label} for row, label in zip(self.x, self.target, strict=True)]
        self.batches = [self.batch]
        self.generator = torch.Generator().manual_seed(0)
        self.model = self.make_block()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    @staticmethod
    def make_block() -> Net:
        return Net()

    @cached_property
    def args(self) -> Any:
        from transformers import TrainingArguments

        return TrainingArguments(output_dir="out", max_steps=2, report_to=[], use_cpu=True)

    @cached_property
    def net(self) -> Any:
        return torch.compile(self.model, backend="fxprec", options={"recipe": "fp8"})

    @cached_property
    def compiled(self) -> Any:
        self.train(self.net)
        return self.net

    @cached_property
    def ddp(self) -> Any:
        return DistributedDataParallel(self.model)

    def loss(self, outputs: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, self.target)

    def train(self, model: Any) -> None:
        for _ in range(5):
            self.loss(model(self.batch)).backward()

    def train_step(self, batch: Any = None) -> torch.Tensor:
        loss = self.loss(self.compiled(self.batch))
        loss.backward()
        return loss.detach()


def is_whole(example: Example) -> bool:
    return "import torch\n" in example.parsed


def evaluate(example: Example) -> None:
    """Run a block. One that needs a package which is not installed is skipped."""
    given = None if is_whole(example) else Given()
    example.namespace.clear()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            used = set(re.findall(r"\w+", example.parsed)) & set(dir(given))
            example.namespace.update({name: getattr(given, name) for name in used})
            PythonEvaluator()(example)
        except (fxprec.FxprecError, ModuleNotFoundError) as error:
            missing = getattr(error.__cause__ or error, "name", None)
            if missing not in OPTIONAL:
                raise
            pytest.skip(f"{missing} is not installed")
    if given is None:
        shown = NEXT_BLOCK.match(example.document.text, example.end)
        assert shown
        check(printed.getvalue().splitlines(), shown[1].splitlines())


def check(printed: list[str], shown: list[str]) -> None:
    """Compare lines: words and integers are the same, losses within 2 %."""
    if not torch.__version__.startswith("2.13."):  # the version that README's figures are of
        shown = [line for line in shown if not line.startswith("fxprec ")]
        printed = [line for line in printed if not line.startswith("fxprec ")]
    assert [NUMBER.sub("#", line) for line in printed] == [NUMBER.sub("#", line) for line in shown]
    for ours, theirs in zip(NUMBER.findall("".join(printed)), NUMBER.findall("".join(shown)), strict=True):
        assert ours == theirs or ("." in theirs and float(ours) == pytest.approx(float(theirs), rel=0.02))


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a block in an empty folder, by the reference lowering where it is no whole program."""
    monkeypatch.chdir(tmp_path)
    if not is_whole(request.node.example):
        monkeypatch.setitem(fxprec.Config.__init__.__kwdefaults__, "lowering", "eager")
    if "istributed" in request.node.example.parsed or "ddp" in request.node.example.parsed:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def mark_blocks(items: list[pytest.Item]) -> None:
    for item in (item for item in items if isinstance(item, SybilItem)):
        marks = ["inductor", "cpu_dependent", "slow"] if is_whole(item.example) else []
        for mark in marks or (["slow"] if item.path.stem in SLOW else []):
            item.add_marker(mark)


pytest_collect_file = Sybil(
    parsers=[CodeBlockParser("python", evaluate)],
    path=str(Path(__file__).parents[1]),
    patterns=["*.md"],
    fixtures=["_fresh", "reader"],
).pytest()
