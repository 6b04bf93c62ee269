"""Compile a graph that has nothing to round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from fxprec import compat
from fxprec.config import Config


def unplanned(gm: GraphModule, examples: Sequence[Any], config: Config) -> Callable[..., Any]:
    """Return the graph's code by Inductor, or by the reference lowering, which needs no compiler, if asked for."""
    settings = compat.mode_settings(config.mode)
    result: Callable[..., Any]
    if config.lowering != "eager":
        result = compat.compile_fx(gm, examples, config_patches=settings)
        return result
    from fxprec.driver.interpreter import interpreted  # imported here: a start from the cache imports no pass

    with compat.stored_autograd(None):
        result = compat.compile_fx(gm, examples, lambda half, *_, **__: interpreted(half), config_patches=settings)
    return result
