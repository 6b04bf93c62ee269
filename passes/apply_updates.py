"""Let the backward graph step parameters: insert updates into the joint graph, and order them after the partition.

An update must run after every reader of its parameter, views of the parameter included. Torch's partition knows neither
rule, so `order_updates` moves the updates after the partition.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch.fx import Graph, GraphModule, Node

from fxprec import compat
from fxprec.kernels.updates import ApplyUpdate
from fxprec.passes.analysis.joint import JointGraph, is_view, results_of, set_results, tensor_of
from fxprec.passes.analysis.replay.kernels import Kind, kind_of


def insert_updates(joint: JointGraph, inputs: Collection[int]) -> int:
    """Replace the gradients of these captured inputs, among the results, by updates; return the number of updates."""
    graph, results = joint.graph, list(joint.results)
    count = 0
    for parameter, at, gradient in joint.stepped(inputs):
        with graph.inserting_before(joint.output):
            update = ApplyUpdate(parameter, gradient).insert(graph)
        update.meta["val"] = tensor_of(gradient).new_empty(0)
        update.meta["partitioner_tag"] = "is_backward"
        results[at] = update
        count += 1
    set_results(graph, results)
    return count


def order_updates(forward: GraphModule, backward: GraphModule) -> None:
    """Move each update behind its gradient and its parameter's last reader; backward returns None instead."""
    compat.writes_after_reading(ApplyUpdate.target)
    graph = backward.graph
    updates = dict.fromkeys(ApplyUpdate.nodes(graph))
    _repeat_views(forward.graph, graph, {ApplyUpdate.of(update).parameter for update in updates})
    order = {node: i for i, node in enumerate(graph.nodes) if node not in updates}
    inputs = graph.find_nodes(op="placeholder")
    for update in updates:
        call = ApplyUpdate.of(update)
        assert call.parameter.op == "placeholder", "a parameter crosses as it is"
        awaited = {call.gradient, inputs[-1], *_made_in_loops(set(_readers(call.parameter)))}
        max(awaited & order.keys(), key=order.__getitem__).append(update)
    set_results(graph, [None if node in updates else node for node in results_of(graph)])
    compat.forget_mutation_regions(graph)
    graph.lint()
    backward.recompile()


def _readers(node: Node) -> Iterator[Node]:
    """Yield the nodes that read a tensor's memory, directly or through views. The views are yielded too."""
    for user in node.users:
        if user.op == "output":
            continue
        yield user
        if is_view(user):
            yield from _readers(user)


def _made_in_loops(readers: Collection[Node]) -> set[Node]:
    """Return ``readers``, and every node that Inductor fuses into loops behind them, up to a tensor in memory.

    An update forces each fused value that reads the parameter into memory. An earlier update would make the gradient of
    a residual stream wait as its addends, one for each norm, and not as one sum.
    """
    found, stack = set(readers), list(readers)
    while stack:
        node = stack.pop()
        if kind_of(node) in (Kind.FUSED, Kind.VIEW) and not _is_read_whole(node):
            users = {user for user in node.users if user.op != "output"} - found
            found |= users
            stack += users
    return found


def _is_read_whole(node: Node) -> bool:
    """Return whether an extern kernel reads a value or a view of it: then the value is written to memory anyway."""
    kinds = {user: kind_of(user) for user in node.users if user.op != "output"}
    return any(kind is Kind.EXTERN or (kind is Kind.VIEW and _is_read_whole(user)) for user, kind in kinds.items())


def _repeat_views(forward: Graph, backward: Graph, parameters: Collection[Node]) -> None:
    """Recompute views of stepped parameters that cross as inputs, so that backward sees the shared memory."""
    made = {node.name: node for node in forward.nodes}
    inputs = {node.name: node for node in backward.nodes if node.op == "placeholder"}
    copies = {parameter.name: parameter for parameter in parameters}
    last = list(inputs.values())[-1]
    for name, crossing in inputs.items():
        chain = _chain(made.get(name))
        if not chain or chain[0].all_input_nodes[0].name not in copies:
            continue
        for view in chain:
            if view.name not in copies:
                with backward.inserting_after(last):
                    last = backward.node_copy(view, lambda node: copies[node.name])
                copies[view.name] = last
        crossing.replace_all_uses_with(copies[chain[-1].name])


def _chain(node: Node | None) -> list[Node]:
    """Return the views that lead from an input of forward to ``node``; empty if anything but views lies between."""
    found: list[Node] = []
    while node is not None and node.op != "placeholder":
        if not is_view(node) or len(node.all_input_nodes) != 1:
            return []
        found.insert(0, node)
        node = node.all_input_nodes[0]
    return found if node is not None else []
