"""The rows of a plan's tables: GEMMs, groups and sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

# What the text or the number in a field is; `entries` checks it in a file.
Share = Annotated[float, "from 0 to 1"]
OneLine = Annotated[str, "one line"]
FormatName = Annotated[str, "a format"]
BlockFormatName = Annotated[str, "a block format"]
Live = Annotated[tuple[tuple[int, ...], ...], "moments by `LIVE`"]


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """One GEMM operator, in execution order."""

    id: int
    node: str
    """FX node name."""
    op: str
    """For instance ``"aten.convolution"``."""
    module: str
    group_before: int
    """Group of its inputs and weight; under ``grouping="dataflow"`` of its first operand."""
    group_after: int
    """Group its output opens."""
    pays: bool | None = None
    """Whether the GEMM, its backward included, multiplies stored codes; None: not asked (docs/gemm.md)."""
    why: str = ""
    """The cost model's reason, or whose word it was."""
    forward: BlockFormatName = ""
    """Block format that the operands of its result are rounded to; ``""``: none, they are multiplied in ``hi``."""
    input_grad: BlockFormatName = ""
    """The same of the operands of its input's gradient."""
    weight_grad: BlockFormatName = ""
    """The same of the operands of its weight's gradient."""
    operands_why: OneLine = ""
    """Why a product that the recipe rounds operands of is multiplied in ``hi``; ``""`` where none is."""


@dataclass(frozen=True, kw_only=True)
class KindCounts:
    """Elements by kind of tensor."""

    output: int = 0
    param: int = 0
    grad_output: int = 0
    grad_param: int = 0

    @property
    def total(self) -> int:
        """Return the elements of all kinds."""
        return self.output + self.param + self.grad_output + self.grad_param


@dataclass(frozen=True, kw_only=True)
class Group:
    """The tensors between GEMMs: between two adjacent ones, or of one region (`Plan.grouping`)."""

    id: int
    elements: int
    """At the traced sizes."""
    elements_by_kind: KindCounts
    low: bool
    """Whether the policy made the group low; single tensors of it may still be high (``keep_high``, promotion)."""
    order: int
    """Position in the policy's order of demotion, 0 first."""
    solved_low: bool | None = None
    """The value of ``low`` when the plan was made; a ``low`` switched by hand takes the group's sites along."""
    operators: tuple[str, ...] = ()
    size: str = ""
    """Elements as an expression in the dynamic dimensions; for people and comparison, never evaluated."""
    saved_bytes: int | None = None
    """Bytes of its storages that the partitioned graph saves for backward, copies of parameters among them."""
    saved_elements: int | None = None
    """Elements of the floating-point tensors among them, copies of parameters left out."""


Way = Literal["", "keep", "narrow", "recompute", "offload"]
WAYS_SAID: Mapping[Way, str] = {
    "keep": "kept",
    "narrow": "kept",
    "recompute": "computed again",
    "offload": "in host memory",
}
"""What a plan's texts call each way."""
Reads = Literal["backward", "gemm codes", "all"]


@dataclass(frozen=True, kw_only=True)
class Site:
    """One row of the plan: one tensor that is stored in a chosen format."""

    id: int
    tensor: str
    kind: Literal["output", "param", "grad_output", "grad_param"]
    module: str
    shape: str
    group: int
    format: FormatName
    """Name of the format in force, promotion included."""
    direction: Literal["forward", "backward"]
    promoted_at: int | None = None
    """Step at which the site was promoted."""
    elements: int = 0
    """At the traced sizes."""
    source: str = ""
    """``file:line`` or ``""``."""
    reads: Reads = "all"
    """The readers of the stored copy: backward alone; GEMMs that multiply its codes, and backward; every reader."""
    way: Way = ""
    """The way in which backward gets the value under a peak budget: kept in high precision, kept in 8 bits or in
    ``saved_as``, computed again, kept in ``format`` in host memory; ``""`` for what backward does not read, and without
    a peak budget."""
    why: OneLine = ""
    """Why its format is not the one its group (or the policy) gives it: nobody would read a low copy, or 8 bits would
    spoil it (docs/compute.md); ``""`` where it is. For people: nothing decides by it."""
    unread: bool = False
    """Whether ``why`` is that nobody would read a low copy: its group is low, and another compilation may read one."""
    saved_as: BlockFormatName = ""
    """Name of the block format in which backward's copy is stored instead; ``""`` where it is in ``format``."""

    @property
    def stored_as(self) -> str:
        """Return the name of the format in which the stored copy lies in memory."""
        return self.saved_as or self.format

    @property
    def order(self) -> tuple[bool, int]:
        """Return a key that sorts sites as they run: backward from the last layer to the first."""
        return (True, -self.id) if self.direction == "backward" else (False, self.id)

    @property
    def is_unread(self) -> bool:
        """Say whether the tensor is high only because nothing would read a low copy."""
        return self.promoted_at is None and self.unread


@dataclass(frozen=True, kw_only=True)
class ByteCount:
    """Bytes saved for backward, each storage once, the graph's inputs and parameters left out.

    ``planned`` counts what the partitioned graph saves, host memory left out. ``fp32`` counts the same tensors in
    float32, without a parameter's copy, since backward would read the parameter. ``fixed`` are the bytes of ``fp32``
    that no format changes: masks, indices, seeds, complex numbers.
    """

    fp32: int
    planned: int
    fixed: int = 0

    @property
    def bf16(self) -> int:
        """Return the bytes of the same tensors in bf16."""
        return (self.fp32 - self.fixed) // 2 + self.fixed


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A storage that the partitioned forward half saves for backward; the rows of a plan add up to its `ByteCount`."""

    tensor: str
    """The parameter or input that it is a copy of, or the node that makes it."""
    module: str
    source: str
    """``file:line`` or ``""``."""
    format: str
    """Name of the format of a copy; of what is saved as it is, the dtype's."""
    bytes: int
    elements: int
    """Floating-point numbers that it holds; 0 of what no format changes, of scales, of a second storage of a tensor."""
    group: int
    site: int | None = None
    """The row of the plan whose copy it is; None of what the plan has no row for (masks, statistics of a norm)."""
    fp32: int = 0
    """Bytes of the same tensor in float32; of a parameter's copy 0, since backward would read the parameter."""
    on_host: bool = False
    """Whether it waits in host memory, which `ByteCount.planned` leaves out."""

    @property
    def bits(self) -> int:
        """Return the bits that an element takes in memory, a block's scale left out; 0 of what has no elements."""
        return 8 * self.bytes // self.elements if self.elements else 0

    @property
    def bf16(self) -> int:
        """Return the bytes of the same tensor in bf16."""
        return self.fp32 // 2 if self.elements else self.fp32


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Estimated launches and bytes of one half of a graph under one lowering, without GEMMs and attention."""

    launches: int
    bytes: int
    """Read and written."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class HalfLowering:
    """The estimates for one half under each lowering, and the lowering that was taken."""

    chosen: Literal["inductor", "triton"]
    inductor: Moved
    triton: Moved


@dataclass(frozen=True, kw_only=True)
class LoweringEstimate:
    """The estimates for both halves; ``backward`` is None where a graph has none."""

    forward: HalfLowering | None = None
    backward: HalfLowering | None = None


@dataclass(frozen=True, kw_only=True)
class LoweringChoice:
    """The choice of ``lowering="auto"``: Inductor's own kernels, generated Triton kernels, or one for each half."""

    asked: OneLine
    chosen: Literal["inductor", "triton", "mixed"]
    why: OneLine
    estimate: LoweringEstimate | None = None
    """None where there was no choice."""


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """Bytes that a step holds from start to end under a step budget; the rest of the budget is the peak budget."""

    budget: int
    weights: int
    """Bytes of parameters and buffers."""
    states: int
    """Bytes of the optimizer's states."""
    chosen: Literal["", "float32", "bf16", "8bit", "4bit"] = ""
    """The form of states that the optimizer left open; ``""`` where it left none open."""
    gradients: int = 0
    """Bytes of gradients that the optimizer sums in bfloat16."""


LIVE = ("kept", "kept in 8 bits", "kept in fewer bits", "computed again", "gradients returned", "all else")


@dataclass(frozen=True, kw_only=True)
class PeakPoint:
    """The predicted bytes and seconds of the step under another budget."""

    peak: int
    waiting: int
    """Bytes between the halves: saved for backward, and the outputs."""
    seconds: float
    """Seconds of the whole step by rough rates of the device, for comparing points."""
    live: Live = ()
    """As `PeakBytes.live`, at fewer moments."""


@dataclass(frozen=True, kw_only=True)
class PeakBytes:
    """Live bytes of activations, temporaries and gradients at the step's peak, as predicted."""

    budget: int
    high: int
    """Bytes with everything kept in high precision."""
    planned: int
    compiled: int | None = None
    """As the compiled graphs allocate; None where that is not known (``lowering="eager"``)."""
    compiled_live: tuple[int, ...] = ()
    """Bytes at up to 100 moments of the compiled step, of each stretch the one that holds most."""
    live: Live = ()
    """Bytes by `LIVE` at up to 100 moments of the step: from each stretch the moment that holds most."""
    kept: tuple[str, ...] = ()
    """Values without a site that are kept as they are (masks, statistics, what only fusion holds), by node."""
    offloaded: tuple[str, ...] = ()
    """Values without a site that wait in host memory, by node."""
    graphs: int = 1
    """Number of training graphs of one step that share the budget."""
    beside: int = 0
    """Bytes of the others that live while this one runs: what waits for backward, and parameter gradients."""
    reserved: int = 0
    """Bytes on a GPU that are left free for libraries' workspaces and what is not known; none of a share's budget."""
    waiting: int | None = None
    """Bytes of this one between its halves, while others run, as compiled where that is known."""
    seconds: float = 0.0
    """Predicted, as those of `points`."""
    points: tuple[PeakPoint, ...] = ()
    """Under other budgets: everything kept high, then from the least time to about the least peak."""

    @property
    def room(self) -> int:
        """Return the bytes that the budget leaves to this graph."""
        return self.budget - self.beside - self.reserved
