"""How operators are declared and their calls read: one place for an argument's name, type and position."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from torch.fx import Graph, Node

from fxprec.ir.calls import Call
from fxprec.ir.symbolic import AS_STORED, Dequantize, Quantize, Rescale, TensorScale, is_in_blocks
from fxprec.kernels import casts, coded_gemms


def stored() -> tuple[Graph, Node, Node, Node]:
    graph = Graph()
    x, table = graph.placeholder("x"), graph.placeholder("table")
    q = Quantize(x, table, 3, "1-4-3+4", "packed").insert(graph)
    return graph, x, table, q


def test_a_call_is_read_by_name():
    graph, x, table, q = stored()
    cast = Quantize.of(q)
    assert (cast.x, cast.table, cast.row, cast.format, cast.storage) == (x, table, 3, "1-4-3+4", "packed") == q.args
    assert not cast.is_simulated
    assert replace(cast, storage="simulate").is_simulated
    read = Dequantize(q, table, AS_STORED, "1-4-3+4", "packed", torch.float32)
    assert read.is_as_stored
    assert list(Dequantize.among(q.users)) == []
    assert list(Dequantize.among([read.insert(graph), q])) == [(q.next, read)]


def test_another_operator_is_no_match_and_no_call():
    _, x, _, q = stored()
    assert [Dequantize.match(arg) for arg in (q, x, 1.0, None)] == [None] * 4
    with pytest.raises(AssertionError, match=r"%quantize.* is no call of fxprec\.dequantize"):
        Dequantize.of(q)


@pytest.mark.parametrize(
    ("position", "arg", "said"), [(0, 1.0, "x is 1.0, no Tensor"), (2, "a row", "row is 'a row', no int")]
)
def test_an_argument_of_another_type_is_named_with_its_node(position: int, arg: object, said: str):
    _, _, _, q = stored()
    q.update_arg(position, arg)
    with pytest.raises(AssertionError, match=rf"%quantize.*: {said}"):
        Quantize.of(q)


def declared(base: type[Call] = Call) -> list[type[Call]]:
    return [base] * ("target" in vars(base)) + [cls for sub in base.__subclasses__() for cls in declared(sub)]


def test_the_schema_is_printed_from_the_fields():
    assert str(Rescale.target._schema) == "fxprec::rescale(Tensor g, Tensor table, int row) -> Tensor"
    assert {Quantize, casts.StoreOver, coded_gemms.MatmulToCodes} < set(declared())
    for operator in declared():
        assert [f.name for f in fields(operator)] == [a.name for a in operator.target._schema.arguments]


def test_an_implementation_with_other_parameters_is_refused():
    def swapped(g: torch.Tensor, row: int, table: torch.Tensor) -> torch.Tensor:
        return g

    def retyped(g: torch.Tensor, table: torch.Tensor, row: str) -> torch.Tensor:
        return g

    for function in (swapped, retyped):
        with pytest.raises(AssertionError, match="is not fxprec::rescale"):
            Rescale.implement(function)


def test_an_implementation_without_a_default_is_refused():
    def scale(x: torch.Tensor, format: str = "int4") -> torch.Tensor:
        return x

    with pytest.raises(AssertionError, match="is not fxprec::tensor_scale"):
        TensorScale.implement(scale)


def test_the_last_arguments_are_left_out_where_they_are_their_defaults():
    graph, x, table, q = stored()
    assert "Tensor? seed=None, Tensor? whole=None)" in str(Quantize.target._schema)
    assert (len(q.args), Quantize.of(q).seed) == (5, None)
    whole = graph.placeholder("whole")
    blocks = Quantize(x, table, 3, "nvfp4", "packed", whole=whole).insert(graph)
    assert blocks.args == (x, table, 3, "nvfp4", "packed", None, whole)
    assert Quantize.of(blocks).whole is whole
    q.args = q.args[:4]
    with pytest.raises(AssertionError, match=r"%quantize.*: fxprec::quantize\("):
        Quantize.of(q)


def test_one_operator_stores_in_blocks_and_not():
    graph, x, table, q = stored()
    blocks = Quantize(x, table, 3, "int4", "packed").insert(graph)
    read = Dequantize(blocks, table, 3, "int4", "packed", torch.float32, 7).insert(graph)
    assert all(map(is_in_blocks, (blocks, read, "int4", "int4/64:bf16")))
    assert not any(map(is_in_blocks, (q, x, "e4m3fn", "1-4-3+4")))


def test_a_call_is_read_when_its_turn_comes() -> None:
    """Two casts, the second of what the first is read back as: lowering the first changes the second's argument."""
    graph = torch.fx.Graph()
    x, other, table = (graph.placeholder(name) for name in ("x", "other", "table"))
    nodes = [Quantize(x, table, row, "1-4-3+4", "packed").insert(graph) for row in range(2)]
    seen = []
    for node, cast in Quantize.among(nodes):
        seen.append(cast.x)
        nodes[1].replace_input_with(x, other)
        assert node is nodes[len(seen) - 1]
    assert seen == [x, other]


@pytest.mark.parametrize("args", [(), ("x", "table", 0, "e4m3", "native", None, None, 1), ("x",)])
def test_a_call_has_all_of_its_arguments_and_no_others(args):
    with pytest.raises(TypeError, match="are no arguments of fxprec::quantize"):
        Quantize(*args)
    with pytest.raises(TypeError, match="are no arguments of fxprec::rescale"):
        Rescale("g", "table", g="again")


def test_a_call_is_a_value():
    call = Rescale("g", "table", 3)
    assert call == Rescale(table="table", row=3, g="g")
    assert hash(call) == hash(Rescale("g", "table", 3))
    assert call != replace(call, row=4) == Rescale("g", "table", 4)
    assert repr(call) == "Rescale(g='g', table='table', row=3)"
    with pytest.raises(FrozenInstanceError):
        call.row = 4
