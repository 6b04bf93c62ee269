"""Every public function says what it does, and what it raises. Read from the source, so nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef
COMMANDS = "fxprec/commands"  # docstrings are the help a terminal shows, and `cli.main` turns errors into a line


@dataclass(frozen=True)
class Public:
    """A public function, or a method of a public class."""

    file: str
    name: str
    node: Function
    owner: ast.ClassDef | None = None


def members(body: list[ast.stmt], file: str, owner: ast.ClassDef | None = None) -> Iterator[Public]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from members(node.body, file, node)
        elif (
            isinstance(node, Function)
            and not node.name.startswith("_")
            and not decorators(node) & {"setter", "overload"}
        ):
            yield Public(file, f"{owner.name}.{node.name}" if owner else node.name, node, owner)


def decorators(node: Function) -> set[str]:
    return {getattr(d, "attr", getattr(d, "id", "")) for d in node.decorator_list}


@cache
def sources() -> tuple[Path, ...]:
    files = [path for folder in ("fxprec", "passes", "runtime") for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(path for path in files if not any(p.is_symlink() for p in path.parents))


@cache
def public() -> tuple[Public, ...]:
    return tuple(
        found
        for path in sources()
        for found in members(ast.parse(path.read_text(encoding="utf-8")).body, str(path.relative_to(ROOT)))
    )


@cache
def contracts() -> frozenset[str]:
    """Return ``Class.method`` of every documented method and attribute, for classes that inherit it."""
    return frozenset(found.name for found in public() if found.owner is not None and ast.get_docstring(found.node))


def bases(owner: ast.ClassDef | None) -> list[str]:
    named = [b.value if isinstance(b, ast.Subscript) else b for b in (owner.bases if owner else [])]
    return [b.attr if isinstance(b, ast.Attribute) else getattr(b, "id", "") for b in named]


@cache
def bases_by_class() -> dict[str, list[str]]:
    return {found.owner.name: bases(found.owner) for found in public() if found.owner is not None}


def inherits_docstring(found: Public) -> bool:
    direct = bases(found.owner)
    names = [*direct, *(name for base in direct for name in bases_by_class().get(base, []))]
    return any(f"{name}.{found.node.name}" in contracts() for name in names)


def raised(node: Function) -> set[str]:
    """Return the names of the exceptions that a function raises itself, functions within it left out."""
    names, waiting = set(), list[ast.AST](node.body)
    while waiting:
        part = waiting.pop()
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(part, ast.Raise) and part.exc is not None:
            error = part.exc.func if isinstance(part.exc, ast.Call) else part.exc
            names.add(error.attr if isinstance(error, ast.Attribute) else getattr(error, "id", ""))
        waiting += ast.iter_child_nodes(part)
    return {name for name in names if name[:1].isupper()}


def test_every_public_function_has_a_docstring_of_its_own_or_of_its_base() -> None:
    assert len(public()) > 2000
    bare = [f"{f.file}: {f.name}" for f in public() if not ast.get_docstring(f.node) and not inherits_docstring(f)]
    assert not bare


def test_a_function_that_raises_says_so() -> None:
    silent = [
        f"{f.file}: {f.name} raises {', '.join(sorted(raised(f.node)))}"
        for f in public()
        if raised(f.node) and not f.file.startswith(COMMANDS) and "aise" not in (ast.get_docstring(f.node) or "")
    ]
    assert not silent


def test_no_docstring_begins_in_the_middle_of_a_sentence() -> None:
    """CONTRIBUTING: one subject, one verb. "Of each graph." says neither."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sources()
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.lstrip().startswith(('"""Of ', '"""Where ', '"""Whose '))
    ]
    assert not found
