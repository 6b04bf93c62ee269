"""The rows of a plan's tables: GEMMs, groups, sites and saved tensors; and the records of its budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fxprec.config.ways import Way

# Annotations of text and numbers in fields; `entries` checks them when it reads a file.
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
    """Operator, for instance ``"aten.convolution"``."""
    module: str
    group_before: int
    """Group of its inputs and weight; under ``grouping="dataflow"`` the group of its first operand."""
    group_after: int
    """Group that its output belongs to."""
    pays: bool | None = None
    """Whether the GEMM, its backward included, multiplies stored codes; None if not decided (docs/gemm.md)."""
    why: str = ""
    """The cost model's reason, or the option or given plan that decided."""
    forward: BlockFormatName = ""
    """Block format of the operands of the forward product; ``""``: the operands are multiplied in ``hi``."""
    input_grad: BlockFormatName = ""
    """Block format of the operands of the input gradient's product, or ``""``."""
    weight_grad: BlockFormatName = ""
    """Block format of the operands of the weight gradient's product, or ``""``."""
    operands_why: OneLine = ""
    """Why a product is multiplied in ``hi`` although the recipe rounds its operands; ``""`` if none is."""


@dataclass(frozen=True, kw_only=True)
class KindCounts:
    """Elements by kind of tensor."""

    output: int = 0
    param: int = 0
    grad_output: int = 0
    grad_param: int = 0

    @property
    def total(self) -> int:
        """The elements of all kinds."""
        return self.output + self.param + self.grad_output + self.grad_param


@dataclass(frozen=True, kw_only=True)
class Group:
    """The tensors between two adjacent GEMMs, or of one data-flow region without GEMMs (`Plan.grouping`)."""

    id: int
    elements: int
    """Number of elements, at the traced sizes."""
    elements_by_kind: KindCounts
    low: bool
    """Whether the policy made the group low; single tensors in it may still be high (``keep_high``, promotion)."""
    order: int
    """Position in the policy's order of demotion, 0 first."""
    solved_low: bool | None = None
    """The value of ``low`` when the plan was made; if ``low`` was edited by hand, `as_edited` switches the sites."""
    operators: tuple[str, ...] = ()
    size: str = ""
    """Elements as an expression in the dynamic dimensions; for people and comparison, never evaluated."""
    saved_bytes: int | None = None
    """Bytes of the group's storages that the partitioned graph saves for backward, including copies of parameters."""
    saved_elements: int | None = None
    """Elements of the floating-point tensors in ``saved_bytes``, without copies of parameters."""


Reads = Literal["backward", "gemm codes", "all"]


@dataclass(frozen=True, kw_only=True)
class Site:
    """A row of the plan: one tensor that is stored in a chosen format."""

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
    """Step after which the site was promoted; None if it is not promoted."""
    elements: int = 0
    """Number of elements, at the traced sizes."""
    source: str = ""
    """``file:line`` or ``""``."""
    reads: Reads = "all"
    """The readers of the stored copy: only backward; backward and GEMMs that multiply its codes; or every reader."""
    way: Way = ""
    """How backward gets the value under a peak budget: ``"keep"`` in high precision, ``"narrow"`` in 8 bits or in
    ``saved_as``, ``"recompute"``, or ``"offload"`` in ``format`` to host memory. ``""`` if backward does not read the
    value, and without a peak budget."""
    why: OneLine = ""
    """Why the format differs from the group's (or the policy's) choice: nothing would read a low copy, or 8 bits would
    spoil the gradient (docs/compute.md). ``""`` if it does not differ. Only for people."""
    unread: bool = False
    """Whether ``why`` is that nothing would read a low copy. The group is low, and another compilation may read one."""
    saved_as: BlockFormatName = ""
    """Name of the block format in which backward's copy is stored; ``""`` if the copy is in ``format``."""
    form: OneLine = ""
    """Name of the way (`Config.ways`) that encodes backward's copy if the copy is in no format; mostly ``""``."""

    @property
    def stored_as(self) -> str:
        """The name of the format of the stored copy."""
        return self.saved_as or self.format

    @property
    def has_codes(self) -> bool:
        """Whether the stored copy is in ``format``."""
        return not (self.saved_as or self.form)

    @property
    def held_as(self) -> str:
        """The name of the way that encodes the stored copy, or of its format."""
        return self.form or self.stored_as

    @property
    def order(self) -> tuple[bool, int]:
        """A sort key that orders sites as they run: forward, then backward from the last layer to the first."""
        return (True, -self.id) if self.direction == "backward" else (False, self.id)

    @property
    def is_unread(self) -> bool:
        """Whether the tensor is high only because nothing would read a low copy."""
        return self.promoted_at is None and self.unread


@dataclass(frozen=True, kw_only=True)
class ByteCount:
    """Bytes saved for backward, each storage once, without the graph's inputs and parameters.

    ``planned`` counts what the partitioned graph saves, without host memory. ``fp32`` counts the same tensors in
    float32, without copies of parameters, since backward could read the parameter. ``fixed`` are the bytes of ``fp32``
    that no format changes: masks, indices, seeds, complex numbers.
    """

    fp32: int
    planned: int
    fixed: int = 0

    @property
    def bf16(self) -> int:
        """The bytes of the same tensors in bf16."""
        return (self.fp32 - self.fixed) // 2 + self.fixed


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A storage that the partitioned forward half saves for backward; the rows of a plan add up to its `ByteCount`."""

    tensor: str
    """The parameter or input that the tensor is a copy of, or the node that makes the tensor."""
    module: str
    source: str
    """``file:line`` or ``""``."""
    format: str
    """Name of a copy's format, or of the dtype if the tensor is saved unchanged."""
    bytes: int
    elements: int
    """Number of floating-point elements; 0 for data that no format changes, for scales, and for a second storage."""
    group: int
    site: int | None = None
    """Id of the site whose copy the tensor is; None if there is no site (masks, statistics of a norm)."""
    fp32: int = 0
    """Bytes of the same tensor in float32; 0 for a parameter's copy, since backward could read the parameter."""
    on_host: bool = False
    """Whether the tensor is in host memory, which `ByteCount.planned` leaves out."""

    @property
    def bits(self) -> int:
        """The bits per element in memory, rounded down, which drops a block's scale; 0 if ``elements`` is 0."""
        return 8 * self.bytes // self.elements if self.elements else 0

    @property
    def bf16(self) -> int:
        """The bytes of the same tensor in bf16."""
        return self.fp32 // 2 if self.elements else self.fp32


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Estimated launches and bytes of one half of a graph under one lowering, without GEMMs and attention."""

    launches: int
    bytes: int
    """Bytes read and written."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class HalfLowering:
    """The estimates for one half under each lowering, and the chosen lowering."""

    chosen: Literal["inductor", "triton"]
    inductor: Moved
    triton: Moved


@dataclass(frozen=True, kw_only=True)
class LoweringEstimate:
    """The estimates for both halves; ``backward`` is None if the graph has no backward half."""

    forward: HalfLowering | None = None
    backward: HalfLowering | None = None


@dataclass(frozen=True, kw_only=True)
class LoweringChoice:
    """The choice of ``lowering="auto"``: Inductor's own kernels, generated Triton kernels, or one for each half."""

    asked: OneLine
    chosen: Literal["inductor", "triton", "mixed"]
    why: OneLine
    estimate: LoweringEstimate | None = None
    """None if there was no choice."""


@dataclass(frozen=True, kw_only=True)
class WholeStep:
    """Bytes in memory throughout a step under a step budget; the rest of the budget is the peak budget."""

    budget: int
    weights: int
    """Bytes of parameters and buffers."""
    states: int
    """Bytes of the optimizer's states."""
    chosen: Literal["", "float32", "bf16", "8bit", "4bit"] = ""
    """The form chosen for optimizer states with states='auto'; ``""`` if there are none."""
    gradients: int = 0
    """Bytes of gradients that the optimizer accumulates in bfloat16."""

    @property
    def throughout(self) -> int:
        """Bytes that stay in memory throughout the step."""
        return self.weights + self.states + self.gradients


LIVE = ("kept", "kept in 8 bits", "kept in fewer bits", "recomputed", "gradients returned", "all else")


@dataclass(frozen=True, kw_only=True)
class PeakPoint:
    """The predicted bytes and seconds of the step under another budget."""

    peak: int
    waiting: int
    """Bytes live between the halves: the saved tensors and the outputs."""
    seconds: float
    """Seconds of the whole step, by rough rates of the device; only for comparing points."""
    live: Live = ()
    """Like `PeakBytes.live`, at fewer moments."""


@dataclass(frozen=True, kw_only=True)
class PeakBytes:
    """The peak of a step: live bytes of activations, temporaries and gradients, predicted and as compiled."""

    budget: int
    high: int
    """Predicted peak with everything kept in high precision, in bytes."""
    planned: int
    compiled: int | None = None
    """Peak of the compiled graphs' allocations, in bytes; None if unknown (``lowering="eager"``)."""
    compiled_live: tuple[int, ...] = ()
    """Live bytes of the compiled step, as up to 100 intervals' maxima, in order."""
    live: Live = ()
    """Predicted live bytes by `LIVE`, at up to 100 moments: in each interval the moment with the most bytes."""
    kept: tuple[str, ...] = ()
    """Values without a site that are kept unchanged (masks, statistics, values that only fusion keeps), by node."""
    offloaded: tuple[str, ...] = ()
    """Values without a site that are kept in host memory, by node."""
    graphs: int = 1
    """Number of training graphs of one step that share the budget."""
    beside: int = 0
    """Bytes of the other graphs that are live while this graph runs: saved tensors and parameter gradients."""
    reserved: int = 0
    """Bytes left free on a GPU for libraries' workspaces and unknown allocations; 0 if the budget is a share."""
    waiting: int | None = None
    """Bytes of this graph that are live between its halves, as compiled if known."""
    seconds: float = 0.0
    """Predicted seconds of the step, comparable with those of `points`."""
    points: tuple[PeakPoint, ...] = ()
    """Predictions for other budgets: everything kept high, then from the least time to about the least peak."""

    @property
    def room(self) -> int:
        """The bytes that the budget leaves for this graph."""
        return self.budget - self.beside - self.reserved

    @property
    def held(self) -> int:
        """The peak of this graph's allocations, in bytes; as predicted if that of the compiled graphs is unknown."""
        return self.planned if self.compiled is None else self.compiled
