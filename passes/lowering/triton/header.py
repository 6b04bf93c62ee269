"""The comment at the top of a dumped kernel: its part of the plan, its inputs and its outputs."""

from __future__ import annotations

from collections.abc import Sequence

from fxprec.passes.analysis.marks import marks
from fxprec.passes.lowering.triton.kernel import Argument, Kernel
from fxprec.passes.lowering.triton.sizes import shape_of
from fxprec.plan import Site


def header(kernel: Kernel, sites: Sequence[Site]) -> str:
    """Return comment lines. The user's names are quoted, so that none can end the comment."""
    by_row = {row: sites[row] for row in kernel.sites if row < len(sites)}
    found = {group for n in kernel.region.nodes if (group := marks(n).group) is not None}
    groups = ", ".join(map(str, sorted(found | {site.group for site in by_row.values()}))) or "none"
    schedule = "element by element" if kernel.region.columns is None else f"rows of {kernel.region.columns}"
    lines = [
        f"{kernel.name}: {schedule}, {kernel.num_warps} warps",
        f"groups: {groups}",
        *(f"site {i}: {s.tensor!a} in {s.module!a}, {s.kind}, {s.format}" for i, s in by_row.items()),
        *(_tensor("reads", a) for a in kernel.inputs),
        *(_tensor("writes", a) for a in kernel.outputs),
        f"bytes moved: {kernel.bytes_moved}",
        f"result: {'the bits' if kernel.is_exact else 'within rounding'} of the reference",
    ]
    return "".join(f"# {line}\n" for line in lines)


def _tensor(verb: str, argument: Argument) -> str:
    val = argument.node.meta["val"]
    shape = " x ".join(map(str, shape_of(val))) or "scalar"
    return f"{verb} {argument.name}: {argument.origin!a}, {str(val.dtype).removeprefix('torch.')}, {shape}"
