"""Which ATen operators are linear in a gradient that comes into them, and in which arguments.

``TERMS`` writes an operator as a sum of terms, each a product of arguments: ``mul`` is one term (0, 1), ``add`` two
terms (0,) and (1,), ``addmm`` the terms (0,) and (1, 2). A scaled gradient may be a factor of a term; all terms of a
sum must carry one scale; an argument in no term must carry none. What is not in the table is taken as not linear.
Data only; `carry_scales` walks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from fxprec.passes.analysis import ops
from fxprec.passes.analysis.ops import existing

aten, prims = torch.ops.aten, torch.ops.prims
Terms: TypeAlias = tuple[tuple[int, ...], ...]

_FIRST: Terms = ((0,),)

# One gradient in, as many times as it comes: layout, sums, and backward operators of forward values and one gradient.
_OF_FIRST = (
    ops.VIEWS
    | ops.CASTS
    | existing(
        aten,
        "neg sum sum.dim_IntList mean mean.dim cumsum flip roll repeat tril triu"
        " index.Tensor _unsafe_index.Tensor index_select gather take"
        " constant_pad_nd _to_copy convolution_backward"
        " max_pool2d_with_indices_backward max_pool3d_with_indices_backward"
        " avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"
        " adaptive_max_pool2d_backward upsample_nearest1d_backward upsample_nearest2d_backward"
        " upsample_nearest3d_backward upsample_bilinear2d_backward"
        " upsample_linear1d_backward upsample_bicubic2d_backward reflection_pad2d_backward"
        " reflection_pad1d_backward replication_pad2d_backward grid_sampler_2d_backward"
        " native_batch_norm_backward native_layer_norm_backward native_group_norm_backward"
        " _fused_rms_norm_backward embedding_dense_backward embedding_backward nll_loss_backward"
        " nll_loss2d_backward _softmax_backward_data _log_softmax_backward_data threshold_backward gelu_backward"
        " silu_backward sigmoid_backward tanh_backward elu_backward hardtanh_backward hardswish_backward"
        " hardsigmoid_backward leaky_relu_backward softplus_backward native_dropout_backward"
        " slice_backward select_backward unfold_backward diagonal_backward mse_loss_backward"
        " smooth_l1_loss_backward binary_cross_entropy_backward glu_backward"
        " col2im im2col pixel_shuffle pixel_unshuffle diagonal_copy unbind_copy.int split_copy.Tensor"
        " view_copy permute_copy transpose_copy.int expand_copy as_strided_copy",
    )
    | existing(prims, "convert_element_type broadcast_in_dim sum transpose view_of rev")
    | ops.ATTENTION_BACKWARD
)

# Sums of terms: the same scale for all.
_SUMS: Mapping[object, Terms] = {
    **dict.fromkeys(existing(aten, "add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor"), ((0,), (1,))),
    **dict.fromkeys(existing(aten, "where.self where.ScalarSelf where.ScalarOther where.Scalar"), ((1,), (2,))),
    **dict.fromkeys(existing(aten, "masked_fill.Scalar masked_fill.Tensor"), ((0,), (2,))),
    **dict.fromkeys(existing(aten, "cat stack"), _FIRST),  # the list of its parts
    **dict.fromkeys(existing(aten, "slice_scatter select_scatter as_strided_scatter diagonal_scatter"), ((0,), (1,))),
    **dict.fromkeys(existing(aten, "index_put _unsafe_index_put"), ((0,), (2,))),
    **dict.fromkeys(existing(aten, "scatter.src scatter_add index_add scatter.value"), ((0,), (3,))),
    **dict.fromkeys(existing(aten, "addmm baddbmm addmv addcmul"), ((0,), (1, 2))),
    **dict.fromkeys(existing(aten, "_unsafe_masked_index _unsafe_masked_index_put_accumulate"), ((0,), (3,))),
    **dict.fromkeys(existing(aten, "masked_scatter"), ((0,), (2,))),
    **dict.fromkeys(existing(aten, "copy"), ((1,),)),
}

# Products: linear in each factor, so one of them may carry a scale.
_PRODUCTS: Mapping[object, Terms] = {
    **dict.fromkeys(existing(aten, "mul.Tensor mul.Scalar mm bmm mv dot"), ((0, 1),)),
    **dict.fromkeys(existing(aten, "linear convolution"), ((0, 1), (2,))),
    **dict.fromkeys(existing(aten, "div.Tensor div.Scalar"), _FIRST),
    **dict.fromkeys(existing(prims, "fma"), ((0, 1), (2,))),
}

TERMS: Mapping[object, Terms] = {**dict.fromkeys(_OF_FIRST, _FIRST), **_PRODUCTS, **_SUMS}

# A gradient that only passes through these on its way out of the graph is unscaled before them, once: they move or
# add up, so before is as cheap as after, and GEMMs can take the scale off themselves.
PASSING = (ops.VIEWS | ops.CASTS | frozenset(_SUMS)) - existing(aten, "addmm baddbmm addmv addcmul expand") | existing(
    aten, "constant_pad_nd"
)

# Values every scale agrees with, where all elements are 0.
ZEROS = existing(aten, "zeros zeros_like new_zeros")
FILLS: Mapping[object, int] = {  # position of the fill value
    **dict.fromkeys(existing(aten, "full full_like"), 1),
    **dict.fromkeys(existing(aten, "new_full"), 2),
    **dict.fromkeys(existing(aten, "scalar_tensor"), 0),
}
# The value filled in beside a gradient that is padded.
PAD_VALUE: Mapping[object, int] = dict.fromkeys(existing(aten, "constant_pad_nd"), 2)
