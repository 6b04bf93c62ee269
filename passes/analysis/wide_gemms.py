"""Find the GEMMs that a CPU computes in float32 because it has no instructions for their operands' dtype."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxprec.config.processor import Processor
from fxprec.kernels.wide_gemms import WIDE
from fxprec.passes.analysis.joint import factors_of, tensor_of


def is_widened(node: Node, processor: Processor) -> bool:
    """Return whether a node multiplies 16-bit tensors on a CPU that converts them first."""
    if node.target not in WIDE:
        return False
    factor = tensor_of(factors_of(node)[0])
    is_narrow = factor.dtype in (torch.bfloat16, torch.float16)
    return is_narrow and factor.device.type == "cpu" and factor.dtype not in processor.gemms
