"""Replay the code that Inductor generated for a graph on fake tensors, to count what the code allocates and frees.

The code's function ``call`` is run statement by statement. Buffers are made and deleted; calls that only have an
effect, such as kernel launches, are skipped. So the bytes include the code's order and its reuse of buffers, for code
that was just compiled and for code from the cache.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._inductor.select_algorithm import extern_kernels
from torch._subclasses.fake_tensor import FakeTensorMode

from fxprec.compat.sizes import traced_size


class NotReplayedError(Exception):
    """The generated code cannot be replayed: for example it has a loop, reads a number from a tensor, or is C++."""


@dataclass
class LiveBytes:
    """A count of the bytes of live storages, and their peak. A storage is live while it has a holder."""

    free: Collection[int] = ()
    """Storages that do not count, because they are live throughout the step."""
    device: str = "cpu"
    """Device type whose storages count, "cpu" or "cuda"; in a GPU's step host memory does not count."""
    workspace: Callable[[str, Sequence[Tensor]], int] = lambda name, operands: 0
    """Returns the bytes that an operator, such as ``"aten::mm"``, needs beside its result while it runs."""
    taken: Callable[[int], int] = int
    """Returns the bytes that the allocator takes for a storage of a size."""
    peak: int = 0
    live: int = 0
    seen: list[int] = field(default_factory=list)
    """Live bytes after each allocation, in order."""
    _holders: Counter[int] = field(default_factory=Counter)

    def hold(self, value: object) -> None:
        """Add a holder to each storage in ``value``; the first holder makes the storage live."""
        for storage, size in _storages(value, self.device):
            self._holders[storage] += 1
            if self._holders[storage] == 1 and storage not in self.free:
                self.live += self.taken(size)
        self._see(self.live)

    def drop(self, value: object) -> None:
        """Remove a holder from each storage in ``value``; a storage without holders is freed."""
        for storage, size in _storages(value, self.device):
            self._holders[storage] -= 1
            if not self._holders[storage] and storage not in self.free:
                self.live -= self.taken(size)

    def run(self, name: str, operands: Sequence[Tensor]) -> None:
        """Count the workspace of an operator while it runs."""
        self._see(self.live + self.workspace(name, operands))

    def _see(self, live: int) -> None:
        self.seen.append(live)
        self.peak = max(self.peak, live)


def storages_of(values: Sequence[object]) -> frozenset[int]:
    """Return numbers that identify the storages of fake tensors, valid while the storages live."""
    return frozenset(storage for storage, _ in _storages(values))


def storage_bytes(
    values: Sequence[object], free: Collection[int], device: str | None = "cpu", taken: Callable[[int], int] = int
) -> int:
    """Return the bytes ``taken`` for storages of tensors, each once, without ``free``. ``device`` None: any device."""
    return sum(taken(size) for storage, size in dict(_storages(values, device)).items() if storage not in free)


def _storages(value: object, device: str | None = None) -> Iterator[tuple[int, int]]:
    if isinstance(value, Tensor):
        if device not in (None, value.device.type):
            return
        storage = value.untyped_storage()
        yield storage._cdata, storage.nbytes()
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _storages(each, device)


def fakes_like(values: Sequence[object], mode: FakeTensorMode) -> list[object]:
    """Return new fake tensors with the values' sizes and strides (hints of symbolic ones), and numbers unchanged."""
    with mode:
        return [_fake_like(value) for value in values]


def _fake_like(value: object) -> object:
    if not isinstance(value, Tensor):
        return _number(value)
    size, stride = ([_number(n) for n in dims] for dims in (value.shape, value.stride()))
    return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)


def _number(value: object) -> Any:
    if isinstance(value, torch.SymInt):
        return traced_size(value)
    return value.node.hint if isinstance(value, torch.SymFloat) else value


def replayed(code: object, inputs: Sequence[object], mode: FakeTensorMode, memory: LiveBytes) -> tuple[object, ...]:
    """Run the code of a compiled graph on fake ``inputs``, which it may free; return its results, which stay live.

    Results alias each other and inputs as in the compiled graph. Raises `NotReplayedError` for code that cannot be
    replayed.
    """
    functions = _functions(getattr(code, "source_code", ""))
    shared: dict[str, Any] = {**_NAMES, **_constants(code, mode)}
    runner = SimpleNamespace(partitions=[partial(_partition, f, shared, memory) for f in functions[1:]])
    with mode:
        run = _Run({**shared, "self": runner}, memory)
        run.bind("args", list(inputs))
        for statement in functions[0].body:
            run.execute(statement)
        memory.hold(run.results)
    return run.results


def _functions(source: str) -> list[ast.FunctionDef]:
    """Return the function ``call``, followed by the parts of the code that become CUDA graphs, in order."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise NotReplayedError("the compiled graph is not Python code") from error
    found = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    if "call" not in found:
        raise NotReplayedError("the compiled graph has no function 'call'")
    parts = sorted((name for name in found if name.startswith("partition_")), key=lambda n: int(n.rpartition("_")[2]))
    return [found["call"], *(found[name] for name in parts)]


def _partition(
    function: ast.FunctionDef, shared: dict[str, object], memory: LiveBytes, args: list[object]
) -> tuple[object, ...]:
    """Run a part of the code on its caller's list of arguments, and free what the part does not return."""
    run = _Run({**shared, "args": args}, memory)
    for statement in function.body:
        run.execute(statement)
    for name in run.names.keys() - shared.keys():
        memory.drop(run.names[name])
    return run.results


def _constants(code: object, mode: FakeTensorMode) -> dict[str, object]:
    constants = getattr(code, "constants", None) or {}
    return dict(zip(constants, fakes_like(list(constants.values()), mode), strict=True))


@dataclass
class _Run:
    names: dict[str, Any]
    memory: LiveBytes
    results: tuple[Any, ...] = ()

    def execute(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=[target], value=value):
                self._assign(target, self._value(value))
                self._run(value)
            case ast.Delete(targets=targets):
                for target in targets:
                    self.memory.drop(self.names.pop(ast.unparse(target), None))
            case ast.Return(value=ast.expr() as value):
                self.results = tuple(self._value(value))
            case ast.With(body=body):
                for inner in body:
                    self.execute(inner)
            case ast.Expr(value=value):
                if ast.unparse(value) == "args.clear()":
                    self.memory.drop(self.names["args"])
                    self.names["args"].clear()
                self._run(value)
            case _:
                raise NotReplayedError(ast.unparse(statement))

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for each, part in zip(target.elts, value, strict=True):
                self._assign(each, part)
        else:
            self.bind(ast.unparse(target), value)

    def bind(self, name: str, value: object) -> None:
        self.memory.hold(value)
        self.memory.drop(self.names.get(name))
        self.names[name] = value

    def _run(self, expression: ast.expr) -> None:
        """Count the workspace of a library's kernel while it runs."""
        path = ast.unparse(expression.func) if isinstance(expression, ast.Call) else ""
        if (name := _library_call(path)) is None:
            return
        assert isinstance(expression, ast.Call)
        operands = [self._value(each) for each in expression.args]
        self.memory.run(name, [x for x in operands if isinstance(x, Tensor)])

    def _value(self, expression: ast.expr) -> Any:
        try:
            return eval(compile(ast.Expression(expression), "<compiled graph>", "eval"), self.names)
        except Exception as error:  # operators may raise anything for fake tensors
            raise NotReplayedError(f"{ast.unparse(expression)}: {error}") from error


def _library_call(path: str) -> str | None:
    """Return the schema name of the operator at ``path``; None if ``path`` is not a library's operator."""
    *namespaces, name = path.removesuffix(".default").split(".")
    if namespaces in (["extern_kernels"], ["aten"]):
        return f"aten::{name}"
    return f"{namespaces[2]}::{name}" if namespaces[:2] == ["torch", "ops"] and len(namespaces) == 3 else None


def _empty(device: str) -> object:
    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


def _reinterpret(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    return x.as_strided(size, stride, x.storage_offset() + offset)


def _device(*args: object) -> None:
    """Replace the call that returns a stream, which allocates nothing."""


_NAMES: dict[str, object] = {
    "torch": torch,
    "math": math,
    "inf": math.inf,
    "nan": math.nan,
    "device": torch.device,
    "aten": torch.ops.aten,
    "inductor_ops": torch.ops.inductor,
    "extern_kernels": extern_kernels,
    "empty_strided": torch.empty_strided,
    "empty_strided_cpu": _empty("cpu"),
    "empty_strided_cuda": _empty("cuda"),
    "reinterpret_tensor": _reinterpret,
    "get_raw_stream": _device,
}
"""The names that the code of a compiled graph may use while it makes buffers."""
