"""Select the tensors that ``keep_high`` keeps high."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from fxprec.errors import did_you_mean
from fxprec.passes.analysis.tensors import CountedTensor

OUTERMOST = "."


def kept_high(
    tensors: Sequence[CountedTensor],
    keep_high: tuple[str, ...] | Literal["ends"],
    ends: frozenset[int] | None = None,
) -> tuple[frozenset[int], list[str]]:
    """Return the ids of the tensors to keep high, and a warning for each pattern that matched nothing.

    A pattern that matches a module covers its submodules; ``"."`` covers the outermost module's own tensors and
    parameters. ``ends`` are the ids for ``keep_high="ends"``; if None, they are found from groups in execution order.
    """
    if keep_high == "ends":
        return frozenset(t.id for t in _ends(tensors)) if ends is None else ends, []
    modules = sorted({t.module for t in tensors})
    matched = {p: {m for m in modules if covers(p, m)} for p in keep_high}
    warnings = [_no_match(pattern, [m for m in modules if m]) for pattern, found in matched.items() if not found]
    held = frozenset[str]().union(*matched.values())
    return frozenset(t.id for t in tensors if t.module in held), warnings


def covers(pattern: str, module: str) -> bool:
    """Return whether a pattern of ``keep_high`` keeps a module high: it matches the module, or one that contains it.

    The outermost module has the name "" and the pattern `OUTERMOST`, which covers nothing else.
    """
    if not module:
        return pattern == OUTERMOST
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def without_effect(tensors: Sequence[CountedTensor], keep_high: tuple[str, ...]) -> Iterator[str]:
    """Yield a message for each pattern whose modules have no output that is saved for backward."""
    for pattern in keep_high:
        held = [t for t in tensors if covers(pattern, t.module)]
        if held and not any(t.saved and t.kind == "output" for t in held):
            yield (
                f"keep_high pattern {pattern!r} changes nothing: backward reads no output of these modules; a layer's "
                "backward reads its input, so name the module that computes the input"
            )


def _no_match(pattern: str, modules: Sequence[str]) -> str:
    if not modules:
        return f"keep_high pattern {pattern!r} matches nothing: the graph names no modules; leave keep_high out"
    hint = did_you_mean(pattern, modules)
    return f"keep_high pattern {pattern!r} matches no module{hint}; modules are {', '.join(modules[:8])}" + (
        f" and {len(modules) - 8} more" if len(modules) > 8 else ""
    )


def _ends(tensors: Sequence[CountedTensor]) -> Iterator[CountedTensor]:
    """Yield the first GEMM's operands, parameters, result and incoming gradient, and the whole last group."""
    last = max((t.group for t in tensors), default=0)
    first_gemm = next((t.module for t in tensors if t.group == 1 and t.kind == "output" and t.of_gemm), None)
    for tensor in tensors:
        beside_first = tensor.group == 0 and (
            (tensor.of_gemm and tensor.module == first_gemm)
            if tensor.kind in ("param", "grad_param")
            else (tensor.feeds_gemm if tensor.kind == "output" else tensor.of_gemm)
        )
        of_first = tensor.group == 1 and (
            (tensor.kind == "output" and tensor.of_gemm) or (tensor.kind == "grad_output" and tensor.feeds_gemm)
        )
        if tensor.group == last or beside_first or of_first:
            yield tensor
