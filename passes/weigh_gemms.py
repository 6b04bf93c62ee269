"""Decide for each GEMM whether multiplying its stored codes pays; `low_gemms` acts on it, and the plan reports it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from fxprec import compat
from fxprec.passes.analysis import gemm_costs
from fxprec.passes.analysis.coded_gemms import MATMULS, Coded, coded, is_plain, native_refusal, operands
from fxprec.passes.analysis.gemm_costs import Answer, Costs, Gpu, Product, costs_of
from fxprec.passes.analysis.joint import dim_hint, is_backward, tensor_of
from fxprec.passes.analysis.operators import Operator
from fxprec.passes.base import Pass, Work
from fxprec.passes.notice import Notice


@dataclass(frozen=True)
class WeighGemms(Pass):
    """Fill ``work.answers``, one per GEMM of the plan, by the user's option, the given plan or the cost model."""

    name: str = "weigh-gemms"
    multiplies_codes: bool = True
    """False in simulation, which has no codes to multiply: the plan then says that nobody asked."""

    def apply(self, work: Work) -> None:
        gpu = gemm_costs.gpu_of(work.joint.device)
        given = {} if work.given is None else {g.id: g.pays for g in work.given.gemms}
        if gpu is None or not self.multiplies_codes:
            not_asked = Answer(None, f"not estimated {'on cpu' if gpu is None else 'in simulation'}")
            work.answers = (not_asked,) * len(work.grouped.gemms)
        else:
            work.answers = tuple(_answer(op, gpu, work, given.get(i)) for i, op in enumerate(work.grouped.gemms))
        if work.settings.asked.gemms == "low":
            only = "only GEMMs on a GPU multiply codes" if gpu is None else "storage='simulate' stores no codes"
            _notice_high(work, "" if gpu is not None and self.multiplies_codes else f"{only}; leave gemms out")


def _notice_high(work: Work, why: str) -> None:
    """Notice GEMMs that multiply no codes. ``why``: of all of them, else "" for the first one's own reason."""
    high = [a for a in work.answers if not a.pays]
    if high:
        said = f"gemms='low', but {len(high)} of {len(work.answers)} GEMMs decode their operands"
        work.notices.append(Notice("weigh-gemms", f"{said}: {why or high[0].why}"))


def _answer(op: Operator, gpu: Gpu, work: Work, given: bool | None) -> Answer:
    if work.settings.recipe.operands is not None:
        return Answer(False, "the recipe rounds operands to blocks, which no kernel here multiplies")
    if not work.joint.tangents and given is None and work.settings.asked.gemms == "auto":
        return Answer(False, "evaluation computes in the high format")
    found = [(node, kernel_of(node, gpu)) for node in gemm_nodes(op)]
    known = [(node, f) for node, f in found if isinstance(f, Found)]
    refused = [f for _, f in found if isinstance(f, str)]
    if not known:
        return Answer(False, refused[0] if refused else f"{op.aten} has no kernel for codes")
    answer = _asked(work, given) or weigh(
        list(products_of(known, work.settings.recipe.hi.torch_dtype)),
        costs_of(gpu),
        in_cuda_graph=compat.makes_cuda_graphs(work.settings.asked.mode),
    )
    rest = f"; {len(refused)} of {len(found)} decoded: {refused[0]}" if refused and answer.pays else ""
    return Answer(answer.pays, answer.why + rest)


def _asked(work: Work, given: bool | None) -> Answer | None:
    """Return the answer of option ``gemms`` or of the given plan, or None where the cost model decides."""
    if work.settings.asked.gemms != "auto":
        return Answer(work.settings.asked.gemms == "low", f"as gemms={work.settings.asked.gemms!r} asks")
    return None if given is None else Answer(given, "as the given plan says")


def weigh(products: Sequence[Product], costs: Costs, *, in_cuda_graph: bool = False) -> Answer:
    """Compare the time of one operator's GEMMs over codes with that over decoded operands."""
    low = gemm_costs.low_seconds(products, costs, in_cuda_graph=in_cuda_graph)
    high = gemm_costs.high_seconds(products, costs)
    pays = low <= gemm_costs.margin() * high
    counts = f"{len(products)} GEMM{'s' * (len(products) > 1)}"
    return Answer(pays, f"{counts} over codes {low * 1e6:.0f} us, decoded {high * 1e6:.0f} us ({costs.source})")


@dataclass(frozen=True)
class Found:
    """The coded operands of a GEMM node, and the kernel that multiplies them."""

    a: Coded
    b: Coded
    kernel: str


def gemm_nodes(op: Operator) -> list[Node]:
    """Return the matrix products among an operator's nodes, forward and backward."""
    return [node for node in (*op.nodes, *op.backward) if node.target in MATMULS]


def over_codes(work: Work) -> set[Node]:
    """Return the matrix products that multiply codes."""
    gpu = gemm_costs.gpu_of(work.joint.device)
    if gpu is None:
        return set()
    paying = (op for op, answer in zip(work.grouped.gemms, work.answers, strict=True) if answer.pays)
    return {gemm for op in paying for gemm in gemm_nodes(op) if isinstance(kernel_of(gemm, gpu), Found)}


def kernel_of(gemm: Node, gpu: Gpu) -> Found | str:
    """Return the kernel that can multiply a GEMM's codes, or why none can."""
    if not is_plain(gemm):
        return "more than a product and a bias"
    first, second = (coded(x) for x in operands(gemm))
    if isinstance(first, str) or isinstance(second, str):
        return first if isinstance(first, str) else str(second)
    if gpu.has_fp8 and native_refusal(first, second, gemm) is None:
        return Found(first, second, "native")
    if not gpu.has_fp8 and any(
        x.source is not None and x.fmt.torch_dtype == torch.float8_e4m3fn for x in (first, second)
    ):
        return "this GPU has no e4m3fn to keep a gradient's inf and NaN in"
    if first.fmt.bits > 8 and second.fmt.bits > 8:
        return f"operands are {first.fmt.name} and {second.fmt.name}"
    return Found(first, second, "generated")


def products_of(nodes: Iterable[tuple[Node, Found]], high: torch.dtype | None) -> Iterator[Product]:
    """Yield the costs of each of one operator's GEMMs; a copy or decode counts for the first GEMM that needs it."""
    made: set[tuple[Node, str]] = set()
    wide = high if high in (torch.bfloat16, torch.float16) else torch.float32
    for gemm, found in nodes:
        left, right = map(tensor_of, operands(gemm))
        (m, k), n = (dim_hint(s) for s in left.shape), dim_hint(right.shape[1])
        sizes = ((found.a, m * k, "rows"), (found.b, k * n, "columns"))
        copies = [size for x, size, layout in sizes if x.layout != layout and _is_new(made, x, "copy")]
        decodes = [s for x, s, _ in sizes if is_backward(gemm) > is_backward(x.q) and _is_new(made, x, "decode")]
        written = [s for x, s, _ in sizes if is_backward(gemm) == is_backward(x.q) and _is_new(made, x, "write")]
        copies = copies if found.kernel == "native" else []
        special = any(x.fmt.nan_code is not None for x in (found.a, found.b))
        yield Product(m, n, k, found.kernel, tuple(copies), tuple(decodes), sum(written), wide, special)


def _is_new(made: set[tuple[Node, str]], x: Coded, what: str) -> bool:
    known = (x.q, what) in made
    made.add((x.q, what))
    return not known
