"""The script of a reduced failure: plain torch and fxprec, quoted texts, inputs made from shapes and a seed."""

from __future__ import annotations

import builtins
import math
import re
import types
from collections.abc import Mapping

import torch

from fxprec.errors import ConfigError
from fxprec.minify.piece import Input, Piece

_HEAD = '''"""A failure reduced by fxprec minify. Run it alone: it exits with 1 while the failure is there."""

import sys

import torch
{imports}
import fxprec

TARGET = {target!r}
FAILURE = {failure!r}
OPTIONS = {options!r}


def floats(seed, shape, dtype, mean, std):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float32) * std + mean).to(dtype)


def integers(seed, shape, dtype, low, high):
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Repro(torch.nn.Module):
    def __init__(self):
        super().__init__()
{own}

'''
_ERROR = """

if __name__ == "__main__":
    from fxprec.minify import largest_error

    name, error = largest_error(Repro, inputs(), OPTIONS)
    print(f"relative error of {{name}}: {{error:.4g}}, limit {limit!r}")
    sys.exit(error > {limit!r})
"""
_CRASH = """

if __name__ == "__main__":
    compiled = torch.compile(Repro(), backend="fxprec", options=OPTIONS)
    for _ in range({steps}):
        outputs = compiled(*inputs())
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        floating = [o for o in outputs if o.is_floating_point() and o.requires_grad]
        if floating:
            sum(o.float().mean() for o in floating).backward()
    print("runs")
"""


def script(
    piece: Piece,
    *,
    target: str,
    failure: str,
    options: Mapping[str, object],
    seed: int,
    limit: float | None,
    steps: int,
) -> str:
    """Return the script. ``limit`` bounds the relative error; None for a crash. Raises `ConfigError`."""
    module, _ = piece.module(seed)
    own, called_with = [], []
    for i, node in enumerate(piece.graph.find_nodes(op="placeholder")):
        spec = piece.inputs[node.name]
        made = _made(spec, seed + i)
        if spec.kind == "input":
            called_with.append(f"{made}.requires_grad_()" if spec.requires_grad else made)
        elif spec.kind == "param" and spec.dtype.is_floating_point:
            grad = "" if spec.requires_grad else ", requires_grad=False"
            own.append(f"        self.{node.name} = torch.nn.Parameter({made}{grad})")
        else:
            own.append(f"        self.register_buffer({node.name!r}, {made})")
    code = module.graph.python_code("self")
    head = _HEAD.format(
        imports=_imports(code.globals, code.src),
        target=target,
        failure=failure,
        options=dict(options),
        own="\n".join(own),
    )
    function = code.src[code.src.index("def forward") :]
    body = "\n".join(f"    {line}" if line.strip() else "" for line in function.splitlines())
    values = "".join(f"        {made},\n" for made in called_with)
    call = f"\n\ndef inputs():\n    return (\n{values}    )\n" if called_with else "\n\ndef inputs():\n    return ()\n"
    tail = _CRASH.format(steps=steps) if limit is None else _ERROR.format(limit=limit)
    return head.rstrip() + "\n\n" + body.rstrip() + "\n" + call + tail


def _made(spec: Input, seed: int) -> str:
    common = f"{seed}, {spec.shape!r}, {spec.dtype}"
    if spec.dtype.is_floating_point:
        return f"floats({common}, {spec.mean!r}, {spec.std!r})"
    return f"integers({common}, {spec.low!r}, {spec.high!r})"


def _imports(names: Mapping[str, object], source: str) -> str:
    """Return the lines that define the names in a graph's code."""
    lines = []
    for name, value in sorted(names.items()):
        if name == "torch" or getattr(builtins, name, None) is value or not re.search(rf"\b{name}\b", source):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            lines.append(f"{name} = float({str(value)!r})")
        elif value is type(None):
            lines.append(f"{name} = type(None)")
        elif value is torch.device:
            lines.append(f"from torch import device as {name}")
        elif isinstance(value, types.ModuleType) and value.__name__.isidentifier():
            lines.append(f"import {value.__name__} as {name}")
        else:
            lines.append(_import_of(name, value))
    return "\n".join(lines)


def _import_of(name: str, value: object) -> str:
    module, own = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    parts = [*str(module).split("."), str(own)]
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"the graph uses {name}, which a script cannot import; move it to the top of a module")
    return f"from {module} import {own} as {name}"
