"""The rows of a diagnosis: one stored tensor, one group, one GEMM, one re-run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of storing one tensor in one format. Shares are shares of its elements."""

    format: str
    damage: float
    """Predicted root mean square, over the parameters, of the relative error of each parameter's gradient."""
    progress: float
    """Predicted relative change of the loss that a gradient step removes; -0.1: the step removes a tenth less."""
    error: float
    """Relative L2 error of the tensor itself."""
    overflow: float
    underflow: float
    zeros: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor, as the plan stores it."""

    graph: int
    site: int
    tensor: str
    kind: str
    module: str
    source: str
    group: int
    elements: int
    format: str
    damage: float
    bias: float
    """Mean error of the planned rounding in last places: away from zero or up, whichever is larger in magnitude."""
    reason: str
    planned: Cost
    may_have_blocks: bool
    """Whether it could be stored in a block format of 8 bits (`passes.forms.blocks`)."""
    costs: Mapping[str, Cost] = field(default_factory=dict)
    """The cost of the same tensor in each candidate format, by the format's name."""

    @property
    def order(self) -> tuple[float, float, int, int]:
        """Sort key: largest damage first, then largest error of the tensor itself, for tensors of equal damage."""
        return (-self.damage, -min(self.planned.error, 1e30), self.graph, self.site)


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """The stored tensors of one group together."""

    graph: int
    group: int
    modules: tuple[str, ...]
    tensors: int
    elements: int
    damage: float
    """Damage as planned."""
    damages: Mapping[str, float]
    """Damage by candidate format."""

    @property
    def name(self) -> str:
        """Return the group's name, with the graph's number for every graph but the first."""
        return f"group {self.group}" if not self.graph else f"graph {self.graph} group {self.group}"


@dataclass(frozen=True, kw_only=True)
class GemmRow:
    """One GEMM whose operands the recipe rounds to blocks, re-run with only its operands rounded."""

    graph: int
    gemm: int
    """Id of the plan's GEMM."""
    module: str
    elements: int
    """Elements of the GEMM's weight."""
    damage: float
    """Measured damage."""
    progress: float


@dataclass(frozen=True, kw_only=True)
class Check:
    """One re-run of the step with some tensors low and all others exact, beside the prediction."""

    name: str
    predicted: float
    measured: float
    predicted_progress: float
    measured_progress: float
