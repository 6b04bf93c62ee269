"""A graph that Dynamo captured: the names of its inputs, the layer's parameters, and how to compile it again."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn import Parameter

from fxprec import compat
from fxprec.config.recipes import Recipe
from fxprec.driver.saved_state import Identity, Shape
from fxprec.errors import ConfigError, LoweringError
from fxprec.ir.symbolic import TABLE_COLUMNS
from fxprec.passes.analysis.inputs import GraphInput, module_path

SUPPORTED_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class SizeGuards:
    """Conditions on the sizes among a graph's inputs, which Inductor added while it compiled outside of Dynamo.

    Dynamo checks the guards of the first compilation, which it called for. A later compilation (a promotion, a solved
    calibration) uses the same symbols, but Dynamo has already built its checks. So fxprec checks the later guards.
    """

    symbols: tuple[tuple[int, sympy.Symbol], ...]
    """The position of each input that is a size, and its symbol."""
    conditions: tuple[sympy.Basic, ...]
    _known: dict[tuple[int, ...], str] = field(default_factory=dict)

    def broken_by(self, args: Sequence[object]) -> str:
        """Return the first condition that the arguments break, or ``""``. A condition that is undecided is broken."""
        sizes = tuple(int(args[i]) for i, _ in self.symbols)  # type: ignore[call-overload]
        if sizes not in self._known:
            values = {symbol: sympy.Integer(size) for (_, symbol), size in zip(self.symbols, sizes, strict=True)}
            broken = (str(c) for c in self.conditions if c.xreplace(values) != sympy.true)
            self._known[sizes] = next(broken, "")
        return self._known[sizes]


@dataclass(frozen=True)
class Captured:
    """Dynamo's graph and its example inputs. The graph is never edited: each compilation edits a copy."""

    gm: GraphModule
    examples: list[Any]  # until `forget_examples`
    device: torch.device
    fake_mode: compat.FakeTensorMode | None
    capacity: int  # rows of the scale table
    ambient: compat.Ambient
    identity: Identity
    is_cut: bool = False  # a graph break ends the graph: other graphs of the step follow
    model: str = ""  # class of the compiled module, or name of the compiled function
    num_guards: list[int] = field(default_factory=list)  # on sizes, when Dynamo's call ended; empty until then

    @classmethod
    def take(cls, gm: GraphModule, examples: Sequence[Any]) -> Captured:
        """Copy the graph and its context. Raises `LoweringError` for a device that fxprec cannot lower to."""
        calls = sum(n.op not in ("placeholder", "output") for n in gm.graph.nodes)
        known = [(_describe(n), n.meta.get("example_value")) for n in _placeholders(gm.graph)]
        identity = Identity(
            is_training=torch.is_grad_enabled()
            and any(isinstance(e, torch.Tensor) and e.requires_grad for e in examples),
            parameters=tuple(of.name for of, _ in known if of.kind == "param"),
            inputs=tuple(_shape(x) for of, x in known if of.kind == "input" and isinstance(x, torch.Tensor)),
        )
        # The fake mode of the inputs' fake values: no other mode knows the symbol of a Python float input.
        modes = (mode for _, x in known if (mode := compat.fake_mode_of(x)) is not None)
        device = _device(examples)
        return cls(
            compat.copied(gm),
            list(examples),
            device,
            next(modes, compat.current_fake_mode()),
            capacity=max(256, 1 << (4 * calls + 2 * len(examples)).bit_length()),
            ambient=compat.Ambient.now(device),
            identity=identity,
            is_cut=compat.ends_in_break(gm),
            model=compat.traced_model(),
        )

    @cached_property
    def inputs(self) -> tuple[GraphInput, ...]:
        """The graph's inputs in call order; the last is the scale table."""
        return (*(_describe(n) for n in _placeholders(self.gm.graph)), GraphInput("scale_table", "table", ""))

    def forget_examples(self) -> None:
        """Release the first batch and the model's tensors: later compilations use fake examples."""
        self.examples.clear()
        self.num_guards.append(len(compat.size_guards(self.fake_mode)))

    def guards_since_dynamo(self) -> SizeGuards | None:
        """Return the guards on sizes that compilations outside of Dynamo have added; None if there are none."""
        conditions = compat.size_guards(self.fake_mode)[self.num_guards[0] :] if self.num_guards else ()
        if not conditions:
            return None
        inputs = enumerate(self.fake_examples)
        return SizeGuards(tuple((i, s) for i, x in inputs if (s := compat.symbol_of(x)) is not None), conditions)

    @property
    def fake_examples(self) -> list[Any]:
        """Example inputs with the symbolic shapes of the first compilation."""
        return [n.meta.get("example_value") for n in _placeholders(self.gm.graph)]

    def refuse_wide_weights(self, recipe: Recipe) -> None:
        """Raise `ConfigError` for a floating-point weight whose dtype is not the pure recipe's high format."""
        wanted = recipe.hi.torch_dtype
        for known, value in zip(self.inputs, self.fake_examples, strict=False):
            if known.kind == "param" and value.is_floating_point() and value.dtype != wanted:
                raise ConfigError(
                    f"recipe {recipe.name!r} keeps weights in {wanted}, and {known.name} is {value.dtype}; call "
                    f"model.to({wanted}) before, and train with fxprec.optim"
                )

    def refuse_layouts(self) -> None:
        """Raise `LoweringError` for an input in oneDNN's own layout, which has no strides that a copy could take."""
        for known, value in zip(self.inputs, self.examples, strict=False):
            if isinstance(value, torch.Tensor) and value.is_mkldnn:
                raise LoweringError(
                    f"{known.name} has the layout {value.layout}: fxprec stores strided tensors only; call .to_dense() "
                    'before, or compile this part with backend="inductor"'
                )

    @contextmanager
    def tracing(self) -> Iterator[Sequence[Any]]:
        """Yield examples to compile with. Outside of Dynamo the examples are fake.

        Symbolic shapes, autocast and grad mode are then those of the first compilation.
        """
        if self.examples:  # Dynamo is calling the backend
            yield self.examples
            return
        with self.ambient.restored(), compat.tracing_with(self.fake_mode), compat.backward_at_once():
            yield self.fake_examples

    def gradient_bytes(self, stepped: Collection[int] = ()) -> int:
        """Return the bytes of its parameters' gradients, without the parameters at the positions ``stepped``."""
        held = ((at, known, x) for at, (known, x) in enumerate(zip(self.inputs, self.fake_examples, strict=False)))
        return sum(x.nbytes for at, known, x in held if known.kind == "param" and x.requires_grad and at not in stepped)

    def empty_table(self) -> torch.Tensor:
        """Return a scale table of zeros, ``(capacity, TABLE_COLUMNS)`` int32."""
        return torch.zeros(self.capacity, TABLE_COLUMNS, dtype=torch.int32, device=self.device)

    def with_table(self) -> tuple[GraphModule, torch.Tensor]:
        """Return a copy of the graph with the scale table as its last input, and the table's example."""
        gm = compat.copied(self.gm)
        table = self.empty_table()
        if (fake_mode := compat.current_fake_mode()) is not None:
            table = fake_mode.from_tensor(table, static_shapes=True)
        last = _placeholders(gm.graph)[-1]
        with gm.graph.inserting_after(last):
            # Not a static input: changed scales make a new table, and CUDA graphs re-record for a new static address.
            compat.without_source(gm.graph.placeholder("fxprec_table")).meta["example_value"] = table
        gm.recompile()
        return gm, table


def _placeholders(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="placeholder"))


def _shape(x: torch.Tensor) -> Shape:
    """Return dtype and sizes; -1 is a dynamic size."""
    return (str(x.dtype), *(size if type(size) is int else -1 for size in x.shape))


def _device(examples: Sequence[Any]) -> torch.device:
    devices = sorted({e.device for e in examples if isinstance(e, torch.Tensor)}, key=str)
    for device in devices:
        if device.type not in SUPPORTED_DEVICES:
            raise LoweringError(
                f"device {str(device)!r}: fxprec lowers to {' and '.join(SUPPORTED_DEVICES)} only; move the model "
                f'there or compile this part with backend="inductor"'
            )
    gpus = [device for device in devices if device.type == "cuda"]
    if len(gpus) > 1:
        raise LoweringError(
            f"a graph has inputs on {' and '.join(map(str, gpus))}: fxprec keeps one scale table, on one GPU; compile "
            "the part on each GPU separately"
        )
    if gpus and (why := compat.refused_gpu(gpus[0])) is not None:
        raise LoweringError(f'{why}; compile this part with backend="inductor"')
    return gpus[0] if gpus else torch.device("cpu")


def _describe(node: Node) -> GraphInput:
    """Return the input with its name in the user's model: ``layer1.0.conv1.weight``."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    path = getattr(source, "name", node.name)
    path = path() if callable(path) else path
    value = node.meta.get("example_value")
    if "_parameters[" in path or isinstance(value, torch.nn.Parameter):
        name = module_path(path.replace("_parameters", "_modules")) or _local_name(path)  # of no module
        return GraphInput(name, "param", name.rpartition(".")[0])
    if "_buffers[" in path:
        name = module_path(path.replace("_buffers", "_modules"))
        return GraphInput(name, "buffer", name.rpartition(".")[0])
    return GraphInput(_local_name(path), "input", "")


def _local_name(path: str) -> str:
    """Turn Dynamo's ``L['x']`` into ``x``, ``L['args'][0]`` into ``args.0``."""
    return ".".join(re.findall(r"[\w.]+", path.removeprefix("L")))


class Parameters:
    """The parameters of one layer, by name. ``changed`` is called when the layer's parameters become others."""

    def __init__(self, inputs: Sequence[GraphInput], args: Sequence[Any], changed: Callable[[], None]) -> None:
        self._names = {i: known.name for i, known in enumerate(inputs) if known.kind == "param"}
        self._changed = changed
        self._own = {i: _ref(args[i]) for i in self._names if isinstance(args[i], Parameter)}

    def may_be(self, args: Sequence[Any]) -> bool:
        """Return whether ``args`` can be a call of this layer: no live parameter of it is replaced by another there.

        New parameters in the place of freed ones become the layer's own from then on.
        """
        dead = []
        for i, own in self._own.items():
            if args[i] is own() or isinstance(args[i], compat.FakeTensor):
                continue
            if own() is not None and isinstance(args[i], Parameter):
                return False
            dead.append(i)
        new = {i: _ref(args[i]) for i in dead if isinstance(args[i], Parameter)}
        if new:
            self._own |= new
            self._changed()
        return True

    @property
    def ids(self) -> frozenset[int]:
        """The identities of the live parameters, which distinguish layers."""
        return frozenset(map(id, self._by_name().values()))

    def of_another(self, other: Parameters) -> bool:
        """Return whether the two have different parameters under a common name, so that they belong to two layers."""
        mine, theirs = self._by_name(), other._by_name()
        return any(mine[name] is not theirs[name] for name in mine.keys() & theirs.keys())

    def _by_name(self) -> dict[str, Parameter]:
        return {self._names[i]: own for i, ref in self._own.items() if (own := ref()) is not None}


def _ref(parameter: Parameter) -> Callable[[], Parameter | None]:
    """Return a weak reference to a parameter.

    Dynamo's DDP optimizer passes a fake parameter. The reference to it is empty, so the first real one takes its place.
    """
    return (lambda: None) if isinstance(parameter, compat.FakeTensor) else weakref.ref(parameter)
