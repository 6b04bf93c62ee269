"""torchao's linear layers in place of a network's own, traced where no GPU is.

torchao defines some of its kernels only where it finds a GPU. Here its own operators are defined without one, or an operator
stands in that reads and writes the same tensors. Nothing of them runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._triton
from torch import Tensor, nn
from torch._inductor import lowering

_BLOCK = 32


def converted(patch: pytest.MonkeyPatch, model: nn.Module, recipe: str) -> nn.Module:
    """Return the model with torchao's linear layers; ``recipe`` is one of its float8 recipes, ``mxfp8`` or ``nvfp4``."""
    convert = {"mxfp8": _mxfp8, "nvfp4": _nvfp4}.get(recipe)
    return _float8(patch, model, recipe) if convert is None else convert(patch, model)


def _float8(patch: pytest.MonkeyPatch, model: nn.Module, recipe: str) -> nn.Module:
    float8, layers = importlib.import_module("torchao.float8"), importlib.import_module("torchao.float8.float8_linear")

    def forward(self: Any, x: Tensor) -> Tensor:
        """As torchao's, which asks whether autocast is on for a GPU; here it is on for the CPU that stands in."""
        x = x.to(torch.bfloat16)
        y = layers.matmul_with_hp_or_float8_args.apply(x, self.weight.t(), self.linear_mm_config, self.config)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # type: ignore[no-any-return]

    patch.setattr(layers.Float8Linear, "forward", forward)
    # torchao would rewrite Inductor's minima for the whole process; what a kernel moves is the same.
    inductor = importlib.import_module("torchao.float8._inductor_patch")
    patch.setattr(inductor, "_patch_inductor_min_max_codegen", lambda: None)
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(model, config=config)  # type: ignore[no-any-return]


@torch.library.custom_op("torchao_stand_in::mxfp8_rows", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _mxfp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Take the place of torchao's Triton kernel: codes, and a scale for 32 elements of a row."""
    raise NotImplementedError


@_mxfp8_rows.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = x.new_empty((*x.shape[:-1], x.shape[-1] // _BLOCK), dtype=torch.float8_e8m0fnu)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scales


@torch.library.custom_op("torchao_stand_in::mxfp8_columns", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _mxfp8_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Take the place of torchao's CUDA kernel: codes, and a scale for 32 elements of a column, both column by column."""
    raise NotImplementedError


@_mxfp8_columns.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    codes = x.new_empty((columns, rows), dtype=torch.float8_e4m3fn).t()
    return codes, x.new_empty((rows // _BLOCK, columns), dtype=torch.float8_e8m0fnu).t()


def _mxfp8(patch: pytest.MonkeyPatch, model: nn.Module) -> nn.Module:
    package = "torchao.prototype"
    layers = importlib.import_module(f"{package}.moe_training.mxfp8_linear")
    kernels = importlib.import_module(f"{package}.mx_formats.kernels")
    tensor = importlib.import_module(f"{package}.mx_formats.mx_tensor")
    product = layers._to_mxfp8_then_scaled_mm

    def of_bfloat16(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        """Round both operands first: torchao's kernels take bfloat16, which FSDP's mixed precision would give them."""
        return product(x.to(torch.bfloat16), weight.to(torch.bfloat16), **options)  # type: ignore[no-any-return]

    def columns(x: Tensor, **options: Any) -> tuple[None, Tensor, None, Tensor]:
        codes, scales = _mxfp8_columns(x)
        return None, codes, None, scales

    patch.setattr(layers, "_to_mxfp8_then_scaled_mm", of_bfloat16)
    patch.setattr(tensor, "triton_to_mxfp8_dim0", lambda x, **options: _mxfp8_rows(x))
    patch.setattr(kernels, "mxfp8_quantize_cuda", columns)

    def layer(linear: nn.Linear) -> nn.Module:
        with torch.device("meta"):
            made = layers.MXFP8Linear(linear.in_features, linear.out_features, linear.bias is not None)
        made.weight, made.bias = linear.weight, linear.bias
        return made  # type: ignore[no-any-return]

    return _replaced(model, layer)


def _nvfp4(patch: pytest.MonkeyPatch, model: nn.Module) -> nn.Module:
    package = "torchao.prototype.moe_training"
    for name in (package, "torchao.prototype.mx_formats.nvfp4_tensor"):
        importlib.import_module(
            name
        )  # other kernels of torchao 0.18.0 name what Triton 3.9 refuses: not asked for here
    patch.setattr(torch.utils._triton, "has_triton", lambda: True)  # which torchao asks before it defines its operators
    training = importlib.import_module(f"{package}.nvfp4_training.nvfp4_training")
    patch.setattr(nn.Linear, "reset_parameters", lambda self: None)
    return _replaced(model, training.NVFP4Linear.from_linear)


def call_scaled_products_as_they_are(patch: pytest.MonkeyPatch) -> None:
    """Let Inductor call ``_scaled_mm_v2`` as an operator: its lowering (torch 2.13) raises at scales in tiles, as NVFP4 has."""
    product = torch.ops.aten._scaled_mm_v2.default
    patch.setitem(lowering.lowerings, product, lowering.fallback_handler(product, add_to_fallback_set=False))


def _replaced(model: nn.Module, layer: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for name, child in model.named_children():
        setattr(model, name, layer(child) if isinstance(child, nn.Linear) else _replaced(child, layer))
    return model
