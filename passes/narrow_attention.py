"""Cast attention's operands to 16 bits in the graph that Dynamo captured, before torch chooses attention's kernel.

torch chooses the kernel of `scaled_dot_product_attention` while AOTAutograd traces, and fxprec's passes see the graph
afterwards. On a GPU, flash attention and cuDNN take 16-bit operands only (``sdp_utils.cpp``,
``check_dtypes_low_precision``). So float32 operands get the slower memory-efficient kernel, or a matrix of all scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxprec import compat
from fxprec.compat import copied
from fxprec.config import Settings
from fxprec.config.grad_scaling import LossScaling
from fxprec.passes.notice import Notice

ALIGNMENT = 8
"""16-bit elements that a GPU's attention reads at once: head sizes are padded to a multiple of this number."""
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def narrow_attention(gm: GraphModule, device: torch.device, settings: Settings, *, is_training: bool) -> Notice | None:
    """Compute float32 attention in the recipe's 16-bit high dtype on a GPU; return a notice if it has to stay float32.

    ``gm`` is edited, and checkpointed regions are replaced by edited copies. Attention under autocast is left alone:
    torch's own rule decides there.
    """
    dtype = settings.recipe.hi.torch_dtype
    if device.type != "cuda" or settings.is_simulated or dtype not in (torch.bfloat16, torch.float16):
        return None
    if dtype == torch.float16 and is_training and not isinstance(settings.grad_scaling, LossScaling):
        return _STAYS_WIDE if _has_wide_attention(gm) else None
    _narrow(gm, dtype)
    return None


_STAYS_WIDE = Notice(
    "attention",
    "it stays in float32, on a kernel slower than flash attention: its gradients would underflow in float16 without a "
    "loss scale; choose a recipe whose hi is bf16, or give grad_scaling='dynamic'",
)


def _has_wide_attention(gm: GraphModule) -> bool:
    bodies = (getattr(gm, name) for name in compat.bodies_traced_in_place(gm.graph))
    return any(map(_is_wide_attention, gm.graph.nodes)) or any(map(_has_wide_attention, bodies))


def _narrow(gm: GraphModule, dtype: torch.dtype) -> None:
    for name in list(compat.bodies_traced_in_place(gm.graph)):
        body = copied(getattr(gm, name))
        _narrow(body, dtype)
        setattr(gm, name, body)
    for node in [n for n in gm.graph.nodes if _is_wide_attention(n)]:
        _Attention(node, dtype).narrow()
    gm.recompile()


def _is_wide_attention(node: Node) -> bool:
    """Return whether a node is attention that reads and returns float32; under autocast it returns 16 bits."""
    if node.op != "call_function" or node.target not in compat.ATTENTION:
        return False
    query, result = _value(_argument(node, "query")), _value(node)
    return all(v is not None and v.dtype == torch.float32 and not v.is_nested for v in (query, result))


def _argument(node: Node, name: str) -> Any:
    at = _ARGUMENTS.index(name)
    return node.args[at] if at < len(node.args) else node.kwargs.get(name)


def _value(node: object) -> Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


class _Attention:
    """One call of attention, rewritten to compute in ``dtype``. Its readers still get float32."""

    def __init__(self, node: Node, dtype: torch.dtype) -> None:
        self.node, self.dtype, self.graph = node, dtype, node.graph

    def narrow(self) -> None:
        node = self.node
        kwargs = {k: v for k, v in node.kwargs.items() if k not in _ARGUMENTS}
        with self.graph.inserting_before(node):
            factors = [self._factor(_argument(node, name)) for name in ("query", "key", "value")]
            mask = self._mask(_argument(node, "attn_mask"))
        rest = [_argument(node, name) or default for name, default in (("dropout_p", 0.0), ("is_causal", False))]
        head = _value(_argument(node, "query"))
        assert head is not None
        if kwargs.get("scale") is None and self._missing(head):
            kwargs["scale"] = head.shape[-1] ** -0.5  # torch's default, for the head size before padding
        node.args, node.kwargs = (*factors, mask, *rest), kwargs
        self._widen_result(_value(node))

    def _factor(self, operand: Node) -> Node:
        value = _value(operand)
        assert value is not None
        missing = self._missing(value)
        wide = self._call(torch.nn.functional.pad, operand, (0, missing)) if missing else operand
        return self._call("to", wide, self.dtype)

    def _missing(self, value: Tensor) -> int:
        size = value.shape[-1]
        return -size % ALIGNMENT if isinstance(size, int) else 0

    def _mask(self, mask: object) -> Any:
        """Convert a floating-point mask; float32's least number, as models write it, becomes the dtype's, not -inf."""
        value = _value(mask)
        if value is None or not value.is_floating_point() or value.dtype == self.dtype:
            return mask
        limits = torch.finfo(self.dtype)
        finite = self._call(torch.clamp, mask, limits.min, limits.max)
        kept = self._call(torch.where, self._call(torch.isinf, mask), mask, finite)
        return self._call("to", kept, self.dtype)

    def _widen_result(self, result: Tensor | None) -> None:
        """Give the users of the call the dtype and head size that they were captured with."""
        assert result is not None
        users, size = list(self.node.users), result.shape[-1]
        with self.graph.inserting_after(self.node):
            last = self._call("to", self.node, torch.float32)
        if self._missing(result):
            with self.graph.inserting_after(last):
                last = self._call(torch.narrow, last, -1, 0, size)
        last.meta["example_value"] = result  # another attention may read it
        for user in users:
            user.replace_input_with(self.node, last)

    def _call(self, target: Any, *args: Any) -> Node:
        kind = "call_method" if isinstance(target, str) else "call_function"
        made = self.graph.create_node(kind, target, args)
        kept = ("nn_module_stack", "stack_trace")
        made.meta |= {name: self.node.meta[name] for name in kept if name in self.node.meta}
        return made
