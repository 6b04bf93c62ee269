"""Let operators read unrounded values, and stored copies only where the copy saves memory or time.

`insert_casts` gives every reader of a stored tensor the rounded value. This pass gives the unrounded value to each
reader that gains nothing from rounding: forward's operators, outputs of the graph, readers of gradients and of
parameters. Two kinds of readers keep the stored copy: backward, for which the copy is saved, and GEMMs that multiply
its codes. A cast without a reader is removed, and its site becomes high.

Definitions: docs/compute.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.fx import Node

from fxprec.ir.symbolic import Dequantize, KeepNonfinite, Quantize
from fxprec.numerics.formats import Format, parse
from fxprec.passes.analysis import regions
from fxprec.passes.analysis.joint import factors_of, is_backward, is_view, operator_of, readers, tensor_of
from fxprec.passes.base import Pass, Work
from fxprec.passes.notice import Notice
from fxprec.passes.sites import read_of, set_format
from fxprec.passes.weigh_gemms import over_codes
from fxprec.plan import Site
from fxprec.plan.lines import named
from fxprec.plan.rows import Reads

# Reasons, printed in the plan, why a tensor of a low group is high.
BOUNDARY = "it is the boundary of a checkpointed region: forward and its recomputation read the one value that is saved"
UNREAD = "nobody would read a low copy"
RECOMPUTED = f"{UNREAD}: checkpointing recomputes it in backward"
GRADIENT = f"{UNREAD}: no GEMM multiplies the codes of this gradient"
HALF_GRADIENT = "it is narrowed to float16, in which GEMMs multiply it, and no GEMM multiplies its codes"
PARAMETER = f"{UNREAD}: no GEMM multiplies its codes, and backward reads the parameter itself"
UNSAVED = f"{UNREAD}: backward does not read it, and no GEMM multiplies its codes"
_UNREAD = frozenset({RECOMPUTED, GRADIENT, PARAMETER, UNSAVED})


@dataclass(frozen=True)
class ComputeHigh(Pass):
    """Give values to the readers that gain nothing from a stored copy, and record in each site who reads the copy."""

    name: str = "compute-high"

    def apply(self, work: Work) -> None:
        _Readers(work).settle()


class _Readers:
    def __init__(self, work: Work) -> None:
        self.work, self.graph, self.hi = work, work.joint.graph, work.settings.recipe.hi
        self.multiplying = over_codes(work)

    def settle(self) -> None:
        stored = defaultdict[int, list[Node]](list)  # site -> casts; a gradient has one for each dtype that GEMMs read
        for q, cast in Quantize.among(Quantize.nodes(self.graph)):
            stored[cast.row].append(q)
        for site in self.work.book.sites:
            found = [self._settle(q, parse(site.format)) for q in stored[site.id]]
            held: tuple[Reads, Format, str] = ("all", parse(site.format), "")  # no cast: it has that dtype already
            reads, fmt, reason = min(found, key=lambda settled: settled[1].bits, default=held)
            settled = replace(site, reads=reads, format=fmt.name)
            if not site.why and parse(site.format).bits < fmt.bits:
                settled = replace(settled, why=reason, unread=reason in _UNREAD)
            elif not site.why:
                settled = self._as_given(settled)
            self.work.book.sites[site.id] = settled
            chosen = self._chosen_by_hand(site) if reason and fmt != parse(site.format) else None
            if chosen is not None:
                self._notice_unfollowed(site, chosen, fmt, reason)
        self._name_unknown()

    def _name_unknown(self) -> None:
        """Add a remark for each operator without a row in the table: what its backward reads keeps its own dtype."""
        reasons = (reason for _, reason in self.work.book.kept_high())
        named = {reason.unknown.partition(" ")[0]: reason.unknown for reason in reasons if reason.unknown}
        for name in named.values():
            self.work.remarks.append(
                f"{name}: its backward reads saved values in their own dtype, since no measurement shows how rounding "
                "would affect its gradient"
            )

    def _chosen_by_hand(self, site: Site) -> str | None:
        """Return the format that the given plan has for a tensor, if it is neither its group's nor high."""
        if self.work.given is None or site.promoted_at is not None or not self.work.joint.tangents:
            return None
        group = self.work.settings.recipe.format_of(site.kind, low=site.group in self.work.assignment.low_groups)
        chosen = parse(site.format)
        is_theirs = any(chosen.has_numbers_of(fmt) for fmt in (group, self.hi))
        return None if is_theirs else self.work.given.sites[site.id].format

    def _notice_unfollowed(self, site: Site, chosen: str, fmt: Format, reason: str) -> None:
        detail = (
            f"sites[{site.id}].format of the given plan is {chosen!r}, and it stays in "
            f"{fmt.name}, since {reason}; storage='simulate' rounds it for every reader"
        )
        self.work.notices.append(Notice(named(site.tensor, site.module, site.source), detail))

    def _as_given(self, site: Site) -> Site:
        """Return the site with the given plan's reason, if that plan stores the tensor in as many bits."""
        given = None if self.work.given is None else self.work.given.sites[site.id]
        if given is None or parse(given.format).bits != parse(site.format).bits:
            return site
        return replace(site, why=given.why, unread=given.unread)

    def _settle(self, q: Node, fmt: Format) -> tuple[Reads, Format, str]:
        """Decide who reads one stored tensor; return the readers, its format, and why the format is not its group's."""
        value, read = Quantize.of(q).x, read_of(q)  # read now: settling another cast may have replaced a view
        if is_backward(q):
            keeps, nobody = self._is_multiplied, GRADIENT
            if not self.hi.has_float32_range and self.hi.torch_dtype is not None and not self._any(read, keeps):
                narrow = self.work.book.guarded_format("grad_output", self.hi)  # GEMMs multiply it in float16
                set_format(narrow, q)
                return "all", narrow, HALF_GRADIENT
        elif self._is_parameter(value):
            keeps, nobody = self._is_multiplied, PARAMETER
        elif regions.is_start(value):
            if not self._is_exact(value):
                # Forward and its recomputation are the same nodes, so both read the one saved value.
                set_format(self.hi, q)
                return "all", self.hi, BOUNDARY
            keeps, nobody = self._is_multiplied, BOUNDARY
        elif regions.is_marked_recompute(value):
            keeps, nobody = self._is_multiplied, RECOMPUTED
        else:
            keeps, nobody = self._reads_forward_copy, UNSAVED
        self._divert(read, value, keeps)
        reads = self._reads_of(read)
        if reads is None:
            self._remove(q)
            return "all", self.hi, nobody
        return reads, fmt, ""

    def _is_exact(self, value: Node) -> bool:
        """Return whether a high copy would equal the value, which is then saved itself."""
        return self.work.settings.storage == "native" and tensor_of(value).dtype == self.hi.torch_dtype

    def _is_parameter(self, value: Node) -> bool:
        base = self.work.operators.base(value)
        return base.op == "placeholder" and self.work.joint.describe(base).kind == "param"

    def _is_multiplied(self, shown: Node, reader: Node) -> bool:
        return reader in self.multiplying and shown in factors_of(reader)

    def _reads_forward_copy(self, shown: Node, reader: Node) -> bool:
        return is_backward(reader) or self._is_multiplied(shown, reader)

    def _any(self, read: Node, keeps: Callable[[Node, Node], bool]) -> bool:
        return any(keeps(shown, reader) for shown, reader in readers(read))

    def _divert(self, old: Node, new: Node, keeps: Callable[[Node, Node], bool]) -> None:
        """Make readers of ``old``, direct or through views, read ``new``, except those for which ``keeps`` holds."""
        for user in list(old.users):
            if is_view(user):
                args = tuple(new if arg is old else arg for arg in user.args)
                with self.graph.inserting_before(user):
                    view = self.graph.call_function(operator_of(user), args, dict(user.kwargs))
                view.meta = dict(user.meta)
                self._divert(user, view, keeps)
                for node in (user, view):
                    if not node.users:
                        self.graph.erase_node(node)
            elif not keeps(old, user):
                user.replace_input_with(old, new)

    def _reads_of(self, read: Node) -> Reads | None:
        found = list(readers(read))
        if any(self._is_multiplied(shown, reader) for shown, reader in found):
            return "gemm codes"
        return "backward" if found else None

    def _remove(self, q: Node) -> None:
        for x, _ in Dequantize.among(q.users):
            for guard, _ in KeepNonfinite.among(x.users):
                self.graph.erase_node(guard)
            self.graph.erase_node(x)
        self.graph.erase_node(q)
