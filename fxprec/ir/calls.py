"""Declares fxprec's operators: the fields of a class are the arguments, and are written down nowhere else.

The fields and their defaults give the schema that torch dispatches by, and the fake reads them by name. A reference or
a kernel whose parameters differ is refused at import. ``Quantize.of(node)`` reads a node's arguments by name,
``cast.insert(graph)`` and `fxprec.passes.sites.emit_call` write them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import FrozenInstanceError, dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    Protocol,
    Self,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

Overwritten = Annotated[Node, "Tensor(a!)"]
Shown = Annotated[Node, "Tensor(a)"]
"""An argument that the operator returns."""
Tensors = Annotated[Sequence[Node], "Tensor[]"]
Size = Annotated[int, "SymInt"]
Sizes = Annotated[Sequence[int], "SymInt[]"]
Flags = Annotated[Sequence[bool], "bool[]"]

# The type in the schema for each annotation of a field or a parameter.
_PRINTED: dict[object, str] = {
    Node: "Tensor",
    Node | None: "Tensor?",
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    int: "int",
    str: "str",
    bool: "bool",
    torch.dtype: "ScalarType",
    Sequence[int]: "SymInt[]",
    Sequence[bool]: "bool[]",
    Sequence[torch.Tensor]: "Tensor[]",
}
# The Python types that a node's argument may have. Where sizes are symbolic, the argument is a node.
_HELD: dict[str, tuple[type, ...]] = {
    "Tensor": (Node,),
    "Tensor?": (Node, type(None)),
    "Tensor[]": (list, tuple),
    "int": (int,),
    "str": (str,),
    "bool": (bool,),
    "ScalarType": (torch.dtype,),
    "SymInt": (int, Node),
    "SymInt[]": (list, tuple),
    "bool[]": (list, tuple),
}
_DECLARED: dict[object, type[Call]] = {}
_REQUIRED = inspect.Parameter.empty
_library = torch.library.Library("fxprec", "DEF")


class FakeCall(Protocol):
    """A `Call` that holds tensors, mostly fake ones, in place of nodes; read by the fields' names."""

    def __getattr__(self, name: str) -> Any: ...


@dataclass_transform(frozen_default=True)
class Call:
    """A call of one of fxprec's operators. Subclasses are frozen dataclasses with a field for each argument, in order.

    Their methods are here once. `dataclass` would compile them for each class.
    A subclass with ``op`` is an operator; a subclass without ``op`` holds fields that several operators share. ``fake``
    returns the result of a call whose tensors are fake; `implement` registers the implementation.
    """

    reads_copy: ClassVar[bool] = False
    """Whether the operator reads back what another stored: backward then saves its operand, not its result."""
    op: ClassVar[str]
    target: ClassVar[torch._ops.OpOverload]
    kinds: ClassVar[dict[str, str]]  # the schema's type of each argument, in order
    defaults: ClassVar[dict[str, object]]  # the default of each argument, `_REQUIRED` if it has none

    def __init_subclass__(
        cls,
        *,
        op: str = "",
        fake: Callable[[FakeCall], object] | None = None,
        returns: str = "Tensor",
        tags: Sequence[torch.Tag] = (),
    ) -> None:
        dataclass(init=False, repr=False, eq=False)(cls)
        if not op:
            return
        assert fake is not None, f"fxprec::{op} has no fake"
        cls.op, cls.kinds = op, _arguments(cls)
        cls.defaults = {name: getattr(cls, name, _REQUIRED) for name in cls.kinds}
        arguments = ", ".join(f"{kind} {name}{_default(cls.defaults[name])}" for name, kind in cls.kinds.items())
        _library.define(f"{op}({arguments}) -> {returns}", tags=tuple(tags))
        torch.library.register_fake(f"fxprec::{op}", lambda *args: fake(cls.with_tensors(*args)))
        cls.target = getattr(torch.ops.fxprec, op).default
        _DECLARED[cls.target] = cls

    def __init__(self, *args: object, **named: object) -> None:
        given = {**dict(zip(self.kinds, args, strict=False)), **named}
        values = {**self.defaults, **given}
        is_whole = len(given) == len(args) + len(named) and len(values) == len(self.kinds)
        if not is_whole or any(value is _REQUIRED for value in values.values()):
            raise TypeError(f"{args} and {named} are no arguments of {self.target._schema}")
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((self.op, *self.__dict__.values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    @classmethod
    def with_tensors(cls, *args: object) -> FakeCall:
        """Return a call whose arguments are tensors in place of nodes."""
        return cast(FakeCall, cls(*args))

    @classmethod
    def of(cls, node: Node) -> Self:
        """Return the call that a node makes."""
        call = cls.match(node)
        assert call is not None, f"{node.format_node()} is no call of {cls.target}"
        return call

    @classmethod
    def match(cls, node: object) -> Self | None:
        """Return the call that a node makes; None if the argument is no node, or calls another operator."""
        if not isinstance(node, Node) or node.target is not cls.target:
            return None
        required = sum(default is _REQUIRED for default in cls.defaults.values())
        is_whole = required <= len(node.args) <= len(cls.kinds) and not node.kwargs
        assert is_whole, f"{node.format_node()}: {cls.target._schema}"
        for arg, (name, kind) in zip(node.args, cls.kinds.items(), strict=False):
            held = _HELD[_without_alias(kind)]
            assert isinstance(arg, held), f"{node.format_node()}: {name} is {arg!r}, no {kind}"
        return cls(*node.args)

    @classmethod
    def like(cls, call: Call, **others: object) -> Self:
        """Return a call with ``others``; the remaining arguments are those of another operator's call, by name."""
        return cls(**{name: getattr(call, name) for name in cls.kinds if name not in others}, **others)

    @classmethod
    def nodes(cls, graph: Graph) -> list[Node]:
        """Return the graph's calls of this operator."""
        return list(graph.find_nodes(op="call_function", target=cls.target))

    @classmethod
    def among(cls, nodes: Iterable[Node]) -> Iterator[tuple[Node, Self]]:
        """Yield the nodes that call this operator, with their calls: ``Dequantize.among(q.users)``.

        A call is read when it is yielded, so a caller that edits the graph in between gets the current arguments.
        """
        for node in list(nodes):
            if (call := cls.match(node)) is not None:
                yield node, call

    @classmethod
    def nodes_among(cls, nodes: Iterable[Node]) -> list[Node]:
        """Return the nodes that call this operator."""
        return [node for node in nodes if node.target is cls.target]

    @classmethod
    def tensors(cls) -> Iterator[str]:
        """Iterate over the names of the tensor arguments, without the table."""
        return (name for name, kind in cls.kinds.items() if kind == "Tensor" and name != "table")

    @property
    def args(self) -> tuple[Argument, ...]:
        """The arguments of a node. Last arguments that equal their defaults are left out, as torch does."""
        found = [(getattr(self, name), default) for name, default in self.defaults.items()]
        while found and found[-1][0] is found[-1][1]:
            found.pop()
        return tuple(arg for arg, _ in found)

    def insert(self, graph: Graph) -> Node:
        """Append this call at the graph's insertion point, without a fake value."""
        return graph.call_function(self.target, self.args)

    @classmethod
    def implement(cls, function: Callable[..., object], *keys: str) -> None:
        """Register the implementation for the devices of these dispatch keys; without keys, for all devices."""
        _check(cls, function)
        for key in keys or ("CompositeExplicitAutograd",):
            torch.library.impl(f"fxprec::{cls.op}", key, function)


def reads_copy(node: Node) -> bool:
    """Return whether a node reads back what one of fxprec's operators stored."""
    call = _DECLARED.get(node.target)
    return call is not None and call.reads_copy


def call_of(node: Node) -> Call:
    """Return the call that a node makes, whichever of fxprec's operators it calls."""
    return _DECLARED[node.target].of(node)


def _arguments(cls: type[object]) -> dict[str, str]:
    hints = get_type_hints(cls, include_extras=True)
    return {name: _printed(hint) for name, hint in hints.items() if get_origin(hint) is not ClassVar}


def _printed(annotation: object) -> str:
    if get_origin(annotation) is Annotated:
        return str(get_args(annotation)[1])
    return _PRINTED[annotation]


def _default(value: object) -> str:
    return "" if value is _REQUIRED else f"={value}"


def _check(cls: type[Call], function: Callable[..., object]) -> None:
    """Refuse a function whose parameters differ from the operator's; ``*rest`` takes all remaining ones."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    has_rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    named = [(p.name, _PRINTED[p.annotation], p.default) for p in parameters if p.kind is not p.VAR_POSITIONAL]
    wanted = [(name, _as_parameter(kind), cls.defaults[name]) for name, kind in cls.kinds.items()]
    assert named == (wanted[: len(named)] if has_rest else wanted), f"{function} is not {cls.target._schema}"


def _as_parameter(kind: str) -> str:
    return "int" if kind == "SymInt" else _without_alias(kind)


def _without_alias(kind: str) -> str:
    return kind.replace("(a!)", "").replace("(a)", "")
