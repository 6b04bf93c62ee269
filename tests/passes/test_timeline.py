"""What a step holds, replayed: closed forms of the live bytes, kinds of nodes, and torch's own counts of operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph
from torch.utils.flop_counter import FlopCounterMode

from fxprec.ir.symbolic import Quantize
from fxprec.passes.analysis.replay.kernels import Kind, flops_of, kind_of
from fxprec.passes.analysis.replay.timeline import Item, Timeline

aten = torch.ops.aten


def extern(size: int, *reads: int, **options: bool) -> Item:
    return Item(Kind.EXTERN, size, reads, **options)


def fused(size: int, *reads: int, **options: bool) -> Item:
    return Item(Kind.FUSED, size, reads, **options)


def test_a_saved_tensor_lives_to_its_last_reader_and_a_returned_one_to_the_end() -> None:
    step = Timeline([extern(8), extern(4, 0, is_stored=True), extern(2, 1), extern(1, 2, is_returned=True)], border=2)
    assert step.live == [8, 12, 4 + 2, 2 + 1]
    step = Timeline([extern(8, is_stored=True), extern(4, is_returned=True), extern(1, 0)], border=2)
    assert step.live == [8, 12, 13]


def test_what_a_returned_view_shows_lives_to_the_end() -> None:
    view = Item(Kind.VIEW, 8, (0,), is_returned=True)
    assert Timeline([extern(8), view, extern(1, 0), extern(1, 2)], border=0).live == [8, 9, 10]


def test_pointwise_results_lie_in_memory_for_libraries_only() -> None:
    assert Timeline([extern(8), fused(8, 0), fused(8, 1), extern(1, 2)], border=4).live == [8, 16, 9]
    # So does what a library reads a view of; then loops read it from there.
    shown = [extern(8), fused(8, 0), Item(Kind.VIEW, 8, (1,)), extern(1, 2), Item(Kind.REDUCED, 1, (1,))]
    assert Timeline(shown, border=5).live == [8, 16, 9, 9]


def test_a_loop_writes_over_what_it_reads_last_element_by_element() -> None:
    given = Item(Kind.FREE, 0, ())

    def live(first: Item, *shown: Item) -> list[int]:
        at = 1 + len(shown)
        items = [given, first, *shown, fused(8, at, is_aligned=True), extern(1, at + 1)]
        return Timeline(items, border=len(items)).live

    assert live(extern(8, 0)) == [8, 8, 9]
    assert live(extern(8, 0), Item(Kind.VIEW, 8, (1,), is_aligned=True)) == [8, 8, 9]
    assert live(extern(8, 0), Item(Kind.VIEW, 8, (1,))) == [8, 16, 9], "transposed"
    assert live(extern(16, 0)) == [16, 24, 9], "of another size"
    assert live(extern(8)) == [8, 16, 9], "a gradient that backward is given"
    assert live(extern(8, 0, is_returned=True)) == [8, 16, 17]
    assert live(extern(8, 0, is_stored=True)) == [8, 16, 9]
    items = [given, extern(8, 0), fused(8, 1, is_aligned=True), extern(1, 2), extern(1, 1, 3)]
    assert Timeline(items, border=5).live == [8, 16, 17, 10], "it is read later"


def test_much_arithmetic_is_not_repeated() -> None:
    def step(**options: bool) -> Timeline:
        two = [Item(Kind.REDUCED, 1, (1,)), Item(Kind.REDUCED, 1, (1,))]
        return Timeline([extern(8), fused(8, 0, **options), *two], border=4)

    assert step().order == [0, 2, 3]
    assert step(is_heavy=True).order == [0, 1, 2, 3]


def test_what_one_loop_makes_and_reads_takes_no_memory() -> None:
    """Inductor gives a heavy result that two nodes read a buffer, and then fuses all three: nothing is allocated."""
    heavy = [extern(8), fused(8, 0, is_heavy=True), fused(8, 1), fused(8, 1)]
    assert Timeline([*heavy, fused(8, 2, 3, is_returned=True)], border=5).order == [0, 4]
    assert Timeline([*heavy, extern(8, 2), fused(8, 3, is_returned=True)], border=6).order == [0, 1, 2, 4, 5]


def test_a_mean_and_a_variance_are_loops_that_their_operand_is_part_of() -> None:
    graph = Graph()
    node = graph.call_function(aten.var_mean.correction, (graph.placeholder("x"), [1]))
    node.meta["val"] = torch.empty(4), torch.empty(4)
    assert kind_of(node) is Kind.REDUCED


def test_what_writes_over_an_item_comes_after_those_that_read_it() -> None:
    """A parameter, its gradient, the step, and a GEMM that reads the parameter by way of a view and a conversion."""
    parameter, gradient = Item(Kind.FREE, 64, ()), extern(32)
    gemm = [Item(Kind.VIEW, 64, (0,)), fused(16, 3), extern(4, 4, is_returned=True)]
    assert Timeline([parameter, gradient, extern(0, 1), *gemm], border=0).order == [1, 2, 4, 5]
    order = Timeline([parameter, gradient, extern(0, 1, writes=0), *gemm], border=0).order
    assert order.index(4) < order.index(2)  # the conversion reads it; the GEMM reads the copy


def test_reads_of_one_tensor_count_once() -> None:
    """Six times read by way of others, one buffer: little to repeat, so two loops do it each for itself."""
    items = [extern(8), *(fused(8, 0) for _ in range(6)), fused(8, 1, 2, 3, 4, 5, 6)]
    items += [Item(Kind.REDUCED, 1, (7,)), Item(Kind.REDUCED, 1, (7,))]
    assert Timeline(items, border=10).order == [0, 8, 9]


def test_all_pieces_of_a_kernels_result_are_there_at_once() -> None:
    """However late one of them is read: a weight's gradient waits beside those of other layers."""
    items = [extern(0), Item(Kind.PIECE, 8, (0,)), Item(Kind.PIECE, 4, (0,)), extern(0, 1)]
    items += [Item(Kind.PIECE, 8, (3,)), Item(Kind.PIECE, 4, (3,)), extern(1, 4), fused(8, 2, is_returned=True)]
    step = Timeline([*items, fused(8, 5, is_returned=True)], border=0)
    assert step.born[2] == step.born[1] == step.order.index(0)
    assert step.live[0] == 12
    assert step.peak >= 8 + 4 + 8 + 4


def test_kernels_run_in_the_order_that_lowering_gives_them() -> None:
    """Four wide gradients are widened one by one, each after its own; in the order of the graph all would wait."""
    items = [extern(1) for _ in range(4)] + [Item(Kind.REDUCED, 100, (i,)) for i in range(4)]
    items += [Item(Kind.REDUCED, 1, (4 + i,), is_returned=True) for i in range(4)]
    assert Timeline(items, border=0).peak < 120
    assert Timeline(items, border=0).order != list(range(12))


def _calls() -> list[Any]:
    x, w, b = torch.randn(6, 5), torch.randn(5, 7), torch.randn(7)
    image, kernel = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    window = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    q = torch.randn(2, 3, 10, 4)
    return [
        (aten.mm.default, (x, w)),
        (aten.addmm.default, (b, x, w)),
        (aten.bmm.default, (x.expand(3, 6, 5), w.expand(3, 5, 7))),
        (aten.convolution.default, (image, kernel, None, *window)),
        (
            aten.convolution_backward.default,
            (torch.randn(2, 4, 8, 8), image, kernel, None, *window, [True, True, False]),
        ),
        (
            aten.convolution_backward.default,
            (torch.randn(2, 4, 8, 8), image, kernel, None, *window, [False, True, False]),
        ),
        (aten.convolution.default, (image, torch.randn(3, 4, 3, 3), None, [2, 2], *window[1:3], True, [1, 1], 1)),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q)),
    ]


@pytest.mark.parametrize("call", _calls(), ids=lambda call: str(call[0]))
def test_operations_are_counted_as_torch_counts_them(call: Any) -> None:
    target, args = call
    graph = Graph()
    nodes = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            arg, val = graph.placeholder(f"x{len(nodes)}"), arg
            arg.meta["val"] = val
        nodes.append(arg)
    node = graph.call_function(target, tuple(nodes))
    with FlopCounterMode(display=False) as counter:
        node.meta["val"] = target(*args)
        if node.target not in counter.flop_registry and target.overloadpacket not in counter.flop_registry:
            (args[0] @ args[1].mT) @ args[2]  # attention on a CPU, which torch does not count
    assert flops_of(node) == counter.get_total_flops()


def test_attention_to_narrower_values_takes_fewer_operations() -> None:
    graph = Graph()
    nodes = [graph.placeholder(name) for name in "qkv"]
    for node, width in zip(nodes, (16, 16, 4), strict=True):
        node.meta["val"] = torch.empty(2, 3, 8, width, device="meta")
    attention = graph.call_function(aten._scaled_dot_product_efficient_attention.default, (*nodes, None, False))
    assert flops_of(attention) == 2 * 2 * 3 * 8 * 8 * (16 + 4)


def test_a_number_written_over_a_constant_is_compared_instead() -> None:
    """Cross-entropy's backward: Inductor makes a comparison with the places of it."""
    graph = Graph()
    places = graph.placeholder("places")
    for written in (graph.call_function(aten.full.default, ([4, 8], 0.0)), graph.placeholder("x")):
        node = graph.call_function(aten.scatter.value, (written, 1, places, -1.0))
        node.meta["val"] = torch.empty(4, 8)
        assert kind_of(node) is (Kind.FUSED if written.op == "call_function" else Kind.EXTERN)


def test_a_cast_is_part_of_a_loop_but_not_one_to_blocks() -> None:
    """A block's scale is known when all of its elements are: a kernel of its own reads them twice."""
    graph = Graph()
    x, table = graph.placeholder("x"), graph.placeholder("table")
    for fmt, kind in (("e4m3fn", Kind.FUSED), ("int4", Kind.EXTERN)):
        q = Quantize(x, table, 0, fmt, "native").insert(graph)
        q.meta["val"] = torch.empty(4)
        assert kind_of(q) is kind
