"""Partition a joint graph into a forward and a backward half, with AOTAutograd's functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias

import torch._functorch.config as functorch_config
import torch._functorch.partitioners as partitioners
from torch._functorch.compile_utils import raise_getitems
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import is_sym_node

Halves: TypeAlias = tuple[GraphModule, GraphModule]


class Partitioner(CustomPartitionerFn):
    """A partitioner for Inductor, made of a function of (joint graph, its inputs, torch's options)."""

    def __init__(self, function: Callable[..., Halves], key: str) -> None:
        self.function, self.key = function, key

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **options: object) -> Halves:
        """Return the forward and the backward half of a joint graph."""
        return self.function(gm, joint_inputs, **options)

    def __deepcopy__(self, memo: object) -> Partitioner:
        return self  # tracing ``scan`` deep-copies Inductor's config

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.key,)  # torch pickles Inductor's config into the keys of both caches

    def uuid(self) -> str:
        """Return the key for Inductor's code cache."""
        return self.key


def without_effect(*, is_cut: bool) -> Iterator[tuple[str, str]]:
    """Yield (torch's setting, why it has no effect). ``is_cut``: a peak budget partitions, not torch's min-cut."""
    if config.custom_partitioner_fn is not None:
        yield (
            "torch._inductor.config.custom_partitioner_fn",
            "is not called: fxprec partitions the graph itself, as its plan says",
        )
    if is_cut and getattr(functorch_config, "enable_activation_offloading", False):
        yield (
            "torch._functorch.config.enable_activation_offloading",
            "moves nothing under a peak_budget; add 'offload' to its ways",
        )


def min_cut(joint: GraphModule, inputs: Sequence[object], **options: Any) -> Halves:
    """Return the halves of torch's own min-cut partition."""
    return partitioners.min_cut_rematerialization_partition(joint, inputs, **options)


def cut(joint: GraphModule, saved: Sequence[Node], drawn: Collection[Node] = (), *, num_fwd_outputs: int) -> Halves:
    """Return the halves of a joint graph, in which forward saves the nodes ``saved`` for backward.

    Random nodes in ``drawn`` that are in both halves draw from the same generator state.
    """
    numbers = [node for node in saved if is_sym_node(node)]
    opaque = [node for node in saved if _is_opaque(node)]
    tensors = [node for node in saved if node not in numbers and node not in opaque]
    more: dict[str, Any] = {"saved_opaque_nodes": opaque} if opaque else {}
    forward, backward = partitioners._extract_fwd_bwd_modules(
        joint, tensors, saved_sym_nodes=numbers, num_fwd_outputs=num_fwd_outputs, **more
    )
    if drawn:
        for node in joint.graph.nodes:
            if node not in drawn:  # attention without dropout is tagged as random too
                node.meta.pop("recompute", None)
        forward, backward = partitioners.functionalize_rng_ops(joint, forward, backward, len(numbers))
    backward = partitioners.reordering_to_mimic_autograd_engine(backward)
    return raise_getitems(forward), raise_getitems(backward)


_is_opaque: Callable[[Node], bool] = getattr(partitioners, "is_opaque_node", lambda node: False)
