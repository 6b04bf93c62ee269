"""Rows of autograd's derivative operators: functions of forward values and one gradient, linear in the gradient."""

from __future__ import annotations

from fxprec.ir.operators.names import row
from fxprec.ir.operators.spec import FIRST, Trait

ROWS = (
    row(
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward"
        " avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"
        " adaptive_max_pool2d_backward upsample_nearest1d_backward upsample_nearest2d_backward"
        " upsample_nearest3d_backward upsample_bilinear2d_backward"
        " upsample_linear1d_backward upsample_bicubic2d_backward reflection_pad2d_backward"
        " reflection_pad1d_backward replication_pad2d_backward grid_sampler_2d_backward"
        " native_batch_norm_backward native_layer_norm_backward native_group_norm_backward"
        " _fused_rms_norm_backward embedding_dense_backward embedding_backward nll_loss_backward"
        " nll_loss2d_backward sigmoid_backward tanh_backward elu_backward hardtanh_backward hardswish_backward"
        " hardsigmoid_backward leaky_relu_backward softplus_backward native_dropout_backward"
        " unfold_backward diagonal_backward mse_loss_backward"
        " smooth_l1_loss_backward binary_cross_entropy_backward glu_backward",
        terms=FIRST,
    ),
    row(
        "_softmax_backward_data _log_softmax_backward_data threshold_backward gelu_backward silu_backward",
        terms=FIRST,
        traits=Trait.WRITES_NEW,
    ),
)
