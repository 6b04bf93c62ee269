"""Compile several of Inductor's C++ loops in one file.

Inductor writes one file per loop. For each file the compiler spends half a second on headers and on a separate library,
about as long as on the loop itself. Here a graph's new loops share files, as many files as Inductor compiles at once.
A record of which library has which loop is stored in Inductor's cache folder. So loops of other graphs, or of the same
graph after a promotion, are still found. Equal layers read other rows of the table of scales, so their loops differ in
the places of a few numbers. Such loops are one function, which gets the address of its first number.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile, get_compile_threads, kernel_code_log
from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir

Loop = Callable[..., None]

_MOST = 16  # loops per file, so that a large graph's files compile in parallel
_DIRECTIVE = re.compile(r"^\s*#(?!pragma\b)", re.MULTILINE)  # directives ignore namespaces, so such a loop cannot share
_ENTRY = re.compile(r'extern "C"\s+void\s+kernel\(')
_PARAMETERS = re.compile(r'extern "C"\s+void\s+kernel\(([^)]*)\)')
_PLACE = r"\[static_cast<int64_t>\((\d+)L\)\]"

log = logging.getLogger(__name__)
_alone: Callable[..., Any] = AsyncCompile.cpp_pybinding
_wait: Callable[..., None] = AsyncCompile.wait


class _NotShared(Exception):
    """A loop's text, or torch's text for its binding, has an unexpected form, so that loops cannot share a file."""


@dataclass(frozen=True)
class _Wanted:
    """A placeholder for a loop in the scope of Inductor's code, until the code waits for all of its loops."""

    types: tuple[str, ...]
    source: str

    def __call__(self, *args: object) -> None:
        """Compile and run the loop by itself, for another thread's code that did not wait for shared loops."""
        self.alone()(*args)

    def alone(self) -> Loop:
        result: Loop = Bindings.load_pybinding(self.types, self.source)
        return result

    def key(self, settings: str) -> str:
        return hashlib.sha256(repr((settings, self.types, self.source)).encode()).hexdigest()


@dataclass(frozen=True)
class _Body:
    """What loops have in common that differ in the places which they read in their arguments."""

    types: tuple[str, ...]
    source: str


def _shared(loop: _Wanted) -> tuple[_Body, tuple[int, ...]]:
    """Return a loop's body, and for each argument the place of the first number that it reads there.

    That is 0 for an argument that is written, or read at places which vary.
    """
    places, source = [0] * len(loop.types), loop.source
    found = _PARAMETERS.search(source)
    names = [] if found is None else [part.split()[-1].lstrip("*&") for part in found[1].split(",") if part.split()]
    if found is None or len(names) != len(loop.types):
        return _Body(loop.types, source), tuple(places)
    head, body = source[: found.end()], source[found.end() :]
    for i, (name, kind) in enumerate(zip(names, loop.types, strict=True)):
        read = [int(place) for place in re.findall(rf"\b{name}{_PLACE}", body)]
        if kind.startswith("const ") and read and len(read) == len(re.findall(rf"\b{name}\b", body)):
            places[i] = min(read)
            body = re.sub(rf"\b{name}{_PLACE}", partial(_moved, name, min(read)), body)
    return _Body(loop.types, head + body), tuple(places)


def _moved(name: str, first: int, read: re.Match[str]) -> str:
    return f"{name}[static_cast<int64_t>({int(read[1]) - first}L)]"


@contextlib.contextmanager
def loops_share_files() -> Iterator[None]:
    """Patch Inductor to compile several C++ loops of a graph in one file; the results are bitwise the same."""
    if AsyncCompile.cpp_pybinding is not _alone or AsyncCompile.wait is not _wait:  # nested, or patched by others
        yield
        return
    replaced: Any = AsyncCompile
    replaced.cpp_pybinding, replaced.wait = _want, _wait_for_all
    try:
        yield
    finally:
        replaced.cpp_pybinding, replaced.wait = _alone, _wait


def _want(self: AsyncCompile, argtypes: Sequence[str], source_code: str, *args: object, **kwargs: object) -> object:
    if args or kwargs:  # settings that a shared file cannot have
        return _alone(self, argtypes, source_code, *args, **kwargs)
    kernel_code_log.info("CPP+Bindings Kernel:\n%s", source_code)
    return _Wanted(tuple(argtypes), source_code)


def _wait_for_all(self: AsyncCompile, scope: dict[str, Any], *args: object, **kwargs: object) -> None:
    wanted = {name: value for name, value in scope.items() if isinstance(value, _Wanted)}
    if wanted:  # of a GPU's code there are none, and asking for the settings compiles a program for each kind of CPU
        loops = _compiled(list(dict.fromkeys(wanted.values())), self)
        scope.update((name, loops[value]) for name, value in wanted.items())
    _wait(self, scope, *args, **kwargs)


def _compiled(wanted: Sequence[_Wanted], compiler: AsyncCompile) -> dict[_Wanted, Loop]:
    settings = _settings()
    places = {loop: Path(cache_dir(), "fxprec-loops", loop.key(settings)) for loop in wanted}
    found = {loop: known for loop in wanted if (known := _stored(places[loop])) is not None}
    files = list[tuple[list[_Wanted], Callable[[], ModuleType]]]()
    for unit in _units([loop for loop in wanted if loop not in found]):
        loops = [loop for equal in unit for loop in equal]
        try:
            files.append((loops, _begun(unit, compiler)))
        except _NotShared as error:
            found |= _one_by_one(loops, error)
    for loops, finish in files:
        try:
            library = finish()
        except Exception as error:  # the compiler may fail for any reason, perhaps because of one loop's text
            found |= _one_by_one(loops, error)
            continue
        for i, loop in enumerate(loops):
            found[loop] = getattr(library, f"kernel_{i}")
            _store(places[loop], library, i)
    return found


def _one_by_one(unit: Sequence[_Wanted], error: Exception) -> dict[_Wanted, Loop]:
    log.warning("%d loops compile one by one: %s", len(unit), str(error).partition("\n")[0])
    return {loop: loop.alone() for loop in unit}


def _settings() -> str:
    """Return the settings that affect a library besides its text."""
    options = {name: value for name, value in config.get_config_copy().items() if name.startswith("cpp.")}
    return repr((torch.__version__, str(pick_vec_isa()), sorted(options.items(), key=str)))


def _units(loops: Sequence[_Wanted]) -> list[list[list[_Wanted]]]:
    """Distribute loops over files of about equal length; loops with one body stand together."""
    by_body: dict[_Body, list[_Wanted]] = {}
    for loop in loops:
        by_body.setdefault(_shared(loop)[0], []).append(loop)
    count = min(len(by_body), max(get_compile_threads(), -(-len(by_body) // _MOST)))
    units: list[list[list[_Wanted]]] = [[] for _ in range(count)]
    lengths = [0] * count
    for body, equal in sorted(by_body.items(), key=lambda item: -len(item[0].source)):
        shortest = lengths.index(min(lengths))
        units[shortest].append(equal)
        lengths[shortest] += len(body.source)
    return units


def _begun(unit: Sequence[Sequence[_Wanted]], compiler: AsyncCompile) -> Callable[[], ModuleType]:
    """Start to compile a file; the result waits for it and raises what the compiler raises. Raises `_NotShared`."""
    several = get_compile_threads() > 1  # with one thread, submit would run at once and take a lock that is held
    finish: Callable[[], ModuleType] = Bindings.load_async(_text(unit), submit_fn=compiler.submit if several else None)
    return finish


def _text(unit: Sequence[Sequence[_Wanted]]) -> str:
    """Return a file's text: each body in its own namespace, then torch's binding with a function for each loop."""
    includes: dict[str, None] = {}
    bodies, functions, rows = list[str](), list[str](), list[str]()
    head = ""
    for n, equal in enumerate(unit):
        lines = _shared(equal[0])[0].source.split("\n")
        includes |= dict.fromkeys(line for line in lines if line.startswith("#include"))
        body, count = _ENTRY.subn(
            f'extern "C" void body_{n}(', "\n".join(x for x in lines if not x.startswith("#include"))
        )
        if count != 1 or _DIRECTIVE.search(body):
            raise _NotShared("a loop's text is not of the expected form")
        bodies.append(f"namespace loop_{n} {{\n{body}\n}}\nusing loop_{n}::body_{n};")
        for loop in equal:
            head, function, row, _ = _binding(loop.types, f"kernel_{len(rows)}", f"body_{n}", _shared(loop)[1])
            functions.append(function)
            rows.append(row)
    *_, tail = _binding((), Bindings.entry_function, Bindings.entry_function, ())
    return "\n".join([*includes, *bodies, head, *functions, "static PyMethodDef py_methods[] = {", *rows, tail])


def _binding(types: Sequence[str], name: str, called: str, places: Sequence[int]) -> tuple[str, str, str, str]:
    """Return torch's binding of a function in four parts: helpers, Python function, row of the methods, module.

    The Python function ``name`` calls ``called`` with the addresses of ``places`` in the arguments.
    """
    args = ", ".join(
        f"parse_arg<{kind.replace('const ', '')}>(args, {i})" + (f" + {place}" if place else "")
        for i, (kind, place) in enumerate(zip(types, places, strict=True))
    )
    text = Bindings.suffix_template.format(
        arg_len=len(types),
        call_entry_func=called + Bindings.call_entry_function.removeprefix(Bindings.entry_function).format(args),
        entry_func=name,
        extra_parse_arg=Bindings.extra_parse_arg.format(array_len=-1),
    )
    head, function, rest = text.partition(f"static PyObject* {name}_py(")
    body, table, rest = rest.partition("static PyMethodDef py_methods[] = {")
    row, end, rest = rest.partition("{NULL, NULL, 0, NULL}")
    if not (function and table and end):
        raise _NotShared("torch binds C++ in another way")
    return head, function + body, row, end + rest


def _stored(place: Path) -> Loop | None:
    """Return a loop from a library compiled earlier; None if there is none, or if its library is gone."""
    try:
        path, key, i = json.loads(place.read_text(encoding="utf-8"))
        result: Loop | None = getattr(Bindings._load_library(path, key), f"kernel_{i:d}")
        return result
    except (OSError, ValueError, TypeError, ImportError, AttributeError):
        return None


def _store(place: Path, library: ModuleType, i: int) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=place.parent, delete=False, encoding="utf-8") as file:
        json.dump([library.__file__, library.key, i], file)
    os.replace(file.name, place)
