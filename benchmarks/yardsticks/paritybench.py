"""ParityBench (github.com/jansel/pytorch-jit-paritybench): modules of public repositories, with inputs that fit them.

The files are read where they lie, by path. What a file imports and this Python lacks is a mock, as ParityBench's own files make
of ``sys``, ``open`` and ``argparse``.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from benchmarks.yardsticks.exercise import SEED
from benchmarks.yardsticks.whole import Made, Model

CASES = re.compile(r"^TESTCASES = (\[.*?^\])", re.MULTILINE | re.DOTALL)
IMPORTED = re.compile(r"^\s*(?:import|from) +(.+)$", re.MULTILINE)


def models(root: Path) -> list[Model]:
    """Return all modules, in an order drawn by a fixed seed. Raises `FileNotFoundError`."""
    files = sorted((root / "generated").glob("test_*.py"))
    if not files:
        raise FileNotFoundError(f"{root / 'generated'} has no test_*.py: give the root of a checkout of ParityBench")
    found = []
    for path in files:
        for place, name in enumerate(_classes(path.read_text(encoding="utf-8"))):
            found.append(Model(f"{path.stem.removeprefix('test_')}.{name}", partial(_make, path, place)))
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(SEED)).tolist()
    return [found[i] for i in order]


def _classes(text: str) -> list[str]:
    cases = CASES.search(text)
    if cases is None:
        return []
    try:
        entries = ast.parse(cases[1], mode="eval").body
    except SyntaxError:  # three of its files
        return []
    return [ast.unparse(entry.elts[0]) for entry in entries.elts]  # type: ignore[attr-defined]


def _make(path: Path, place: int) -> Made:
    """Make one module with its inputs; float inputs want gradients."""
    with contextlib.redirect_stdout(io.StringIO()):
        cls, init, forward, _ = _loaded(path).TESTCASES[place]
        torch.manual_seed(SEED)
        args, kwargs = init()
        module = cls(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, _wanted, forward())
    return module, tuple(args), dict(kwargs)


def _wanted(t: Tensor) -> Tensor:
    return t.detach().requires_grad_(t.dtype == torch.float32)


def _loaded(path: Path) -> Any:
    if path.stem in sys.modules:
        return sys.modules[path.stem]
    _mock_all(path.read_text(encoding="utf-8"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _mock_all(text: str) -> None:
    helpers = ModuleType("_paritybench_helpers")
    helpers.__dict__.update(_mock_config=_Config, _mock_layer=_layer, _paritybench_base=object)
    helpers.__dict__.update(patch_functional=_patch_functional, _fails_compile=lambda: lambda test: test)
    sys.modules.setdefault("_paritybench_helpers", helpers)
    for line in IMPORTED.findall(text):
        mock_missing(line, set())


def mock_missing(line: str, own: set[str]) -> None:
    """Put mocks in the place of modules of an import's line that cannot be imported, but for those of these names."""
    names = line.split(" import ")[0].split(",") if " import " in line else line.split(",")
    for name in (n.split(" as ")[0].strip() for n in names):
        if name.partition(".")[0] not in own:
            _mock(name)


def _mock(name: str) -> None:
    """Put mocks in the place of a module that cannot be imported, and of the packages that it is in."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        return
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        part = ".".join(parts[:end])
        if part in sys.modules:
            continue
        try:
            importlib.import_module(part)
        except Exception:
            sys.modules[part] = mock.MagicMock(name=part, __path__=[], __spec__=None)


class _Config(dict[str, Any]):
    """What stands for a configuration that the file does not have."""

    __getattr__ = dict.__getitem__


def _layer(in_features: Any = None, out_features: Any = None, *args: Any, **kwargs: Any) -> torch.nn.Module:
    if in_features and out_features:
        return torch.nn.Linear(in_features, out_features, **kwargs)
    return torch.nn.ReLU()


def _patch_functional() -> None:
    """Let ``torch.functional`` and ``torch.nn.functional`` have each other's functions: files call both ``F``."""
    for one, other in ((torch.functional, torch.nn.functional), (torch.nn.functional, torch.functional)):
        for name in dir(other):
            if name[0].islower() and not hasattr(one, name):
                setattr(one, name, getattr(other, name))
