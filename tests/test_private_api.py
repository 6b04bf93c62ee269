"""What may change with any version of torch or Triton is used in fxprec/compat/ and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("fxprec", "passes", "runtime")
FLOOR = "fxprec/compat/"
PRIVATE_IN_TRITON = ("backends", "compiler", "knobs", "runtime")

ANYWHERE = {
    "torch._ops.OpOverload": "the class of every operator in a graph; it has no public name",
    "torch._foreach_": "torch documents these with their underscore",
}
HERE = {
    ("runtime/aps/fsdp.py", "torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter"): (
        "a base class, so wanted at import; fxprec.compat imports Inductor, for which fxprec.aps does not wait"
    ),
    ("runtime/aps/fsdp_gather.py", "torch.distributed.fsdp._fully_shard._fsdp_api.AllGather"): (
        "a base class, as ReduceScatter"
    ),
    ("runtime/optim/stepper.py", "torch.optim.optimizer._use_grad_for_differentiable"): (
        "a decorator, so wanted at import; fxprec.compat imports Inductor, for which fxprec.optim does not wait"
    ),
}


def is_private(name: str) -> bool:
    library, *rest = name.split(".")
    if library == "triton" and rest and rest[0] in PRIVATE_IN_TRITON:
        return True
    return library in ("torch", "triton") and any(part.startswith("_") and not part.endswith("__") for part in rest)


def used(text: str) -> Iterator[str]:
    """Yield the dotted names of torch and Triton that a module imports or reads."""
    inner: set[ast.AST] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node not in inner:
            parts: list[str] = []
            at: ast.expr = node
            while isinstance(at, ast.Attribute):
                inner.add(at)
                parts.append(at.attr)
                at = at.value
            if isinstance(at, ast.Name):
                yield ".".join([at.id, *reversed(parts)])


def test_private_api_is_used_on_the_ground_floor_only() -> None:
    unused, leaks = set(HERE), []
    for path in sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        for name in filter(is_private, used(path.read_text(encoding="utf-8"))):
            unused.discard((place, name))
            if not place.startswith(FLOOR) and (place, name) not in HERE and not name.startswith(tuple(ANYWHERE)):
                leaks.append(f"{place}: {name}")
    assert leaks == [], f"give each a function in {FLOOR}"
    assert unused == set(), "no longer used: take it off the list"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch._inductor.config", "torch._inductor.config"),
        ("from torch.optim.optimizer import _use", "torch.optim.optimizer._use"),
        ("def f():\n    from torch._dynamo import exc", "torch._dynamo.exc"),
        ("x = torch._C._autograd.now()", "torch._C._autograd.now"),
        ("x = triton.knobs.runtime.interpret", "triton.knobs.runtime.interpret"),
    ],
)
def test_each_form_of_use_is_seen(text: str, name: str) -> None:
    assert [n for n in used(text) if is_private(n)] == [name]


@pytest.mark.parametrize("text", ["import torch", "x = torch.Tensor.__torch_dispatch__", "self._torch.x", "tl.load(x)"])
def test_what_is_public_is_not(text: str) -> None:
    assert not [n for n in used(text) if is_private(n)]
