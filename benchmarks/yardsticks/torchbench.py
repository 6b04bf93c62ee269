"""The models of torchbench (github.com/pytorch/benchmark), each with the inputs of its own folder, read where they lie.

What a folder imports and this Python lacks is a mock. Models that torchvision has are torchvision's, made small.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from benchmarks.yardsticks import dynamo_models, paritybench
from benchmarks.yardsticks.whole import Made, Model

BATCH = 2


def models(root: Path, suite: Path) -> list[Model]:
    """Return the models that PyTorch at ``root`` lists and torchvision, or torchbench at ``suite``, has.

    In an order drawn by a fixed seed. Raises `FileNotFoundError`.
    """
    if not (suite / "torchbenchmark" / "models").is_dir():
        raise FileNotFoundError(f"{suite} has no torchbenchmark/models: give the root of a checkout of torchbench")
    names = dynamo_models.names(root, "all_torchbench") + dynamo_models.names(root, "torchbench")
    return [Model(name, partial(_make, suite, name)) for name in dynamo_models.drawn(names)]


def _make(suite: Path, name: str) -> Made:
    if name in dynamo_models.vision().models.list_models():
        return dynamo_models.torchvision_model(name)
    return _from(suite, name)


def _from(suite: Path, name: str) -> Made:
    with contextlib.redirect_stdout(io.StringIO()):
        cls = _loaded(suite, name).Model
        batch = BATCH if getattr(cls, "ALLOW_CUSTOMIZE_BSIZE", True) else None
        module, given = cls(test="train", device="cpu", batch_size=batch).get_module()
    if sum(p.numel() for p in module.parameters()) > dynamo_models.LARGEST:
        raise ValueError(f"more than {dynamo_models.LARGEST} parameters")
    given = tree_map_only(Tensor, Tensor.detach, given)
    return (module, (), dict(given)) if isinstance(given, dict) else (module, tuple(given), {})


def _loaded(suite: Path, name: str) -> Any:
    if str(suite) not in sys.path:
        sys.path.insert(0, str(suite))
    folder = suite / "torchbenchmark" / "models" / name
    if not folder.is_dir():
        raise ModuleNotFoundError(f"torchbench has no {name}")
    own = {path.stem for path in folder.rglob("*")} | {"torchbenchmark"}
    for path in folder.rglob("*.py"):
        for line in paritybench.IMPORTED.findall(path.read_text(encoding="utf-8", errors="ignore")):
            paritybench.mock_missing(line, own)
    return importlib.import_module(f"torchbenchmark.models.{name}")
