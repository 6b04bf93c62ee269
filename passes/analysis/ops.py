"""Op tables: which ATen ops are GEMMs, which only move data, which a partitioner may repeat.

Data only; the walks that use it live with the passes.
"""

from __future__ import annotations

from types import ModuleType

import torch

from fxprec import compat
from fxprec.compat.versions import NEWEST_TORCH, torch_version

aten = torch.ops.aten
prims = torch.ops.prims
CONVERT = prims.convert_element_type.default


def existing(namespace: ModuleType, names: str) -> frozenset[object]:
    """Resolve ``op.overload`` names. Raises `LookupError` for a name that a supported torch lacks."""
    found = {name: _overload(namespace, *name.split(".")) for name in names.split()}
    missing = [name for name, op in found.items() if op is None]
    if missing and torch_version() <= NEWEST_TORCH:
        raise LookupError(f"torch {torch.__version__} has no operator {', '.join(missing)} in {namespace.__name__}")
    return frozenset(op for op in found.values() if op is not None)


def _overload(namespace: ModuleType, packet: str, overload: str = "default") -> object:
    return getattr(getattr(namespace, packet, None), overload, None)


# Scaled-dot-product attention contains GEMMs and is one operator (docs/algorithms.md, "Operators, tensors, groups").
ATTENTION = existing(
    aten,
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"
    " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
    " _scaled_dot_product_fused_attention_overrideable",
)
ATTENTION_BACKWARD = existing(
    aten,
    "_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward"
    " _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward"
    " _scaled_dot_product_fused_attention_overrideable_backward",
)
ATTENTION_ON_GPU = ATTENTION - existing(aten, "_scaled_dot_product_flash_attention_for_cpu")
ATTENTION_BACKWARD_ON_GPU = ATTENTION_BACKWARD - existing(aten, "_scaled_dot_product_flash_attention_for_cpu_backward")
GEMMS = existing(aten, "convolution mm addmm bmm baddbmm linear _scaled_mm addmv mv dot") | ATTENTION
GEMMS_BACKWARD = existing(aten, "convolution_backward mm addmm bmm baddbmm mv addmv dot") | ATTENTION_BACKWARD

# Positions of the tensor operands that a GEMM multiplies; the rest (bias, statistics) is not an operand.
GEMM_OPERANDS: dict[object, tuple[int, ...]] = {
    **dict.fromkeys(existing(aten, "convolution mm bmm linear mv dot _scaled_mm"), (0, 1)),
    **dict.fromkeys(existing(aten, "addmm baddbmm addmv"), (1, 2)),
    **dict.fromkeys(existing(aten, "convolution_backward"), (0, 1, 2)),
    **dict.fromkeys(ATTENTION, (0, 1, 2)),
    **dict.fromkeys(ATTENTION_BACKWARD, (0, 1, 2, 3)),
}

# Ops that move or alias data in its own dtype: not counted, they follow their producer's precision.
VIEWS = existing(
    aten,
    "view _unsafe_view reshape _reshape_alias permute transpose.int t expand slice.Tensor select.int split.Tensor"
    " split_with_sizes unbind.int squeeze squeeze.dim squeeze.dims unsqueeze clone contiguous alias detach"
    " as_strided diagonal unfold narrow chunk flatten.using_ints unflatten.int movedim.int swapaxes"
    " lift_fresh_copy lift_fresh expand_as view_as ravel swapdims numpy_T matrix_H mT mH",
)

# Operators whose backward is the identity towards an input that was not broadcast; ``sub`` towards its first.
LINEAR_SUMS = frozenset({"aten.add", "aten.sub"})

CASTS = existing(aten, "_to_copy") | existing(prims, "convert_element_type")

# What hands out a collective's result once it is there (tensor parallel layers).
WAITS = compat.waits_for_collectives()

# Writes of functionalised mutations back to their inputs; never part of an operator.
MUTATIONS = existing(aten, "copy_ set_.source_Tensor") | existing(prims, "copy_to")

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
