"""Layers whose products round their operands in blocks, and the same written out by hand."""

from __future__ import annotations

from typing import Any

import torch
from helpers import compiled, gradients
from one_pass import Ran, run_pass
from torch import Tensor, nn

import fxprec
from fxprec import Operands, Recipe
from fxprec.plan.explain import explain

NAME = "block-gemms"
MXFP8 = "e4m3fn/32:e8m0up"  # as recipe "mxfp8" has it
EVERY = {"forward": "mxfp8", "input_grad": "mxfp8", "weight_grad": "mxfp8"}
NVFP4_EDEN = {**dict.fromkeys(EVERY, "nvfp4"), "square_weights": True, "eden": 32}


def recipe(**operands: Any) -> Recipe:
    """Nothing else than operands is rounded."""
    return Recipe(name="test", hi="fp32", lo_forward="fp32", lo_backward="fp32", operands=Operands(**operands))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))


def batch() -> Tensor:
    return torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1))


def ran(model: nn.Module | None = None, **options: Any) -> Ran:
    return run_pass(NAME, model or layers(), batch(), **({"low_ratio": None} | options))


def along_last(x: Tensor, fmt: str) -> Tensor:
    return fxprec.quantize(x.contiguous(), fmt)


def along_rows(x: Tensor, fmt: str) -> Tensor:
    return along_last(x.mT, fmt).mT


def in_squares(w: Tensor, fmt: str, n: int) -> Tensor:
    """Round a matrix tile by tile, each in a row of its own: in the block format of n x n elements."""
    rows, columns = w.shape
    tiles = [w[i : i + n, j : j + n].reshape(-1) for i in range(0, rows, n) for j in range(0, columns, n)]
    rounded = iter(along_last(torch.cat(tiles), fmt).split(n * n))
    found = torch.empty_like(w)
    for i in range(0, rows, n):
        for j in range(0, columns, n):
            found[i : i + n, j : j + n] = next(rounded).view(n, n)
    return found


class ByHand(torch.autograd.Function):
    """A linear layer whose three products round their operands, written out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, formats: tuple[str, str, str], square: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.formats, ctx.square = formats, square
        weight = in_squares(w, square, 16) if square else along_last(w, formats[0])
        return torch.addmm(b, along_last(x, formats[0]), weight.mT)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        _, of_input, of_weight = ctx.formats
        weight = in_squares(w, ctx.square, 16) if ctx.square else along_rows(w, of_input)
        dx = along_last(g, of_input) @ weight
        dw = along_last(g.mT, of_weight) @ along_rows(x, of_weight)
        return dx, dw, g.sum(0), None, None


def by_hand(model: nn.Sequential, x: Tensor, formats: tuple[str, str, str], square: str = "") -> Tensor:
    first, last = model[0], model[2]
    x = ByHand.apply(x.flatten(0, 1), first.weight, first.bias, formats, square)
    x = x * 0.5 * (1 + torch.erf(x * 0.5**0.5))  # as traced; ATen's own differs in the last bit where AVX2 is newest
    return ByHand.apply(x, last.weight, last.bias, formats, square).view(2, 32, 32)


def trained(backend: fxprec.Backend, model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    out = compiled(model, backend)(x)
    (out * torch.arange(32.0)).square().mean().backward()
    return out.detach(), gradients(model)


def lines_about(backend: fxprec.Backend, tensor: str) -> list[str]:
    return [line.strip() for line in explain(backend.plans[0], tensor)]
