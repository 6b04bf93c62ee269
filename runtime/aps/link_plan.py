"""Define the plan of a link, as plain data and as a file: how many bits each layer's gradient is sent in."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, TypeAlias

from fxprec.errors import FxprecError, PlanError, did_you_mean
from fxprec.plan import files
from fxprec.plan.entries import record
from fxprec.plan.reading import Entry, NotNegative, Positive, fields_of, integer, word
from fxprec.runtime.aps.links import Links
from fxprec.runtime.aps.predict import Link

KIND, SCHEMA = "link", 1
_HEAD = {"kind": word(KIND), "schema": integer(SCHEMA, SCHEMA, str(SCHEMA))}
BITS = (32, 16, 8, 4)


def _bits(entry: Entry) -> int:
    if type(entry.value) is not int or entry.value not in BITS:
        raise entry.wrong(f"one of {', '.join(map(str, BITS))}")
    return entry.value


Bits: TypeAlias = Annotated[int, _bits]
Ranks: TypeAlias = Annotated[int, integer(2, 2**31, "2**31")]
Node: TypeAlias = Annotated[int, integer(1, 2**31, "2**31")]


@dataclass(frozen=True, slots=True)
class LayerBits:
    """One layer of a link plan; layers are in the order in which they are sent."""

    name: str
    bucket: int
    elements: int
    bits: Bits
    """32 (the gradient's own dtype), 16, 8 or 4."""
    exposed: NotNegative
    """Seconds of the layer's transfer after the last gradient is ready."""
    error: NotNegative
    """Weighted squared error that the layer's rounding adds to the mean gradient, in the unit of the budget."""
    by_nodes: bool = False
    """Whether the layer goes by nodes: in 16 bits or more inside of nodes, and in `bits` between them."""
    low_rank: int = 0
    """Columns of the two matrices that the layer is sent as, both in `bits`; 0 sends its elements."""

    @property
    def way(self) -> str:
        """Return as words the way the layer is sent: its bits, whether by nodes, and its rank."""
        return f"{f'rank {self.low_rank} in ' * (self.low_rank > 0)}{self.bits} bits{' by nodes' * self.by_nodes}"


@dataclass(frozen=True, slots=True)
class GatheredBits:
    """One FSDP2 module of a link plan, and the bits in which its parameters are gathered."""

    name: str
    elements: int
    """Elements of one rank's shard."""
    bits: Bits
    """4 are bits of differences from what ranks have."""
    bytes_kept: int = 0
    """Bytes of all ranks' shards that a rank keeps to add differences to."""


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """The layers that a step sends over a link, their bits, and the predicted end; equal on all ranks."""

    ranks: Ranks
    bytes_per_second: Positive
    """Rate of a rank's link, or of a node's link to the other nodes."""
    latency: NotNegative
    """Seconds of a small exchange on that link."""
    budget: NotNegative
    """Bound of `error`, as a share of the squared norm of one rank's gradient."""
    error: NotNegative
    ready: tuple[NotNegative, ...]
    """Seconds from the first bucket's gradients to each bucket's."""
    end: NotNegative
    """Seconds from the first bucket's gradients to the last mean."""
    bytes_sent: int
    """Bytes that a rank sends in a step, headers of its messages included."""
    layers: tuple[LayerBits, ...]
    gathered: tuple[GatheredBits, ...] = ()
    """FSDP2 modules whose parameters the plan gathers."""
    bytes_gathered: int = 0
    """Bytes that a rank sends to gather the parameters of those modules once."""
    node: Node = 1
    """Ranks of a node; 1 if all links are alike."""
    inside: Link | None = None
    """A rank's link inside of its node."""
    bytes_between: int = 0
    """Bytes of `bytes_sent` that a node's ranks send together to other nodes, without headers."""
    bytes_kept: int = 0
    """Bytes that a rank keeps from step to step: residuals of error feedback and of low rank, and factors."""

    @property
    def links(self) -> Links:
        """Return the links that the plan is made for."""
        return Links(Link(self.bytes_per_second, self.latency), self.inside, self.node)

    @property
    def exposed(self) -> float:
        """Return the seconds that the exchange adds to the backward pass."""
        return self.end - max(self.ready, default=0.0)

    @property
    def bits(self) -> dict[str, int]:
        """Return the bits of each layer by its name."""
        return {layer.name: layer.bits for layer in self.layers}

    @property
    def ways(self) -> dict[str, str]:
        """Return `LayerBits.way` of each layer by its name."""
        return {layer.name: layer.way for layer in self.layers}

    @property
    def digest(self) -> str:
        """Return a short hash of everything in the plan, for comparison between ranks."""
        return hashlib.sha256(self.dumps().encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data; `from_dict` reads it."""
        head = {"kind": KIND, "schema": SCHEMA, **asdict(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in head.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> LinkPlan:
        """Read JSON data as hostile input. Raises `PlanError` naming the entry, the cause and the way out."""
        return read(Entry(data))

    def dumps(self) -> str:
        """Return the text of a plan file, one layer a line: the same plan gives the same text."""
        data = self.to_dict()
        layers = ",\n".join(f"  {json.dumps(layer, allow_nan=False)}" for layer in data.pop("layers"))
        head = ",\n".join(f" {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in data.items())
        return f'{{\n{head},\n "layers": [\n{layers}\n ]\n}}\n'

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a plan file: whole or not at all. Raises `PlanError`."""
        files.write(self.dumps(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LinkPlan:
        """Read a plan file. Raises `PlanError` naming the file, the entry, the cause and the way out."""
        try:
            return read(files.read_entry(path))
        except FxprecError as error:
            raise PlanError(f"{os.fsdecode(path)}: {error}") from None


def is_link_plan(entry: Entry) -> bool:
    """Return whether JSON data claims to be a link plan."""
    return isinstance(entry.value, Mapping) and entry.value.get("kind") == KIND


def read(entry: Entry) -> LinkPlan:
    """Return the link plan in JSON data. Raises `PlanError` naming the entry, the cause and the way out."""
    fields_of(_HEAD, unread=None)(entry)
    plan: LinkPlan = record(LinkPlan, replace(entry, value={k: v for k, v in entry.value.items() if k not in _HEAD}))
    for key, names in (("layers", [r.name for r in plan.layers]), ("gathered", [r.name for r in plan.gathered])):
        twice = [name for name, times in Counter(names).items() if times > 1]
        if twice:
            raise entry.get(key).fail(f"name {twice[0]!r:.60} twice", "give each layer one line")
    if any(layer.bucket >= len(plan.ready) for layer in plan.layers):
        raise entry.get("layers").fail(f"have buckets beyond the {len(plan.ready)} entries of ready", "plan again")
    if plan.ranks % plan.node or (plan.node == 1) != (plan.inside is None):
        raise entry.fail(f"has {plan.ranks} ranks and nodes of {plan.node}, or no link inside of them", "plan again")
    if plan.node == 1 and any(layer.by_nodes for layer in plan.layers):
        raise entry.get("layers").fail("are exchanged by nodes, and node is 1", "plan again")
    if any(layer.low_rank and (layer.by_nodes or layer.bits != 16) for layer in plan.layers):
        raise entry.get("layers").fail("are sent in low rank by nodes, or not in 16 bits", "plan again")
    return plan


def explained(plan: LinkPlan, layer: str = "") -> Iterator[str]:
    """Yield lines about a plan: what it sends and exposes, then one line per layer, or only that of a named layer.

    Raises `PlanError` for a name that the plan does not have.
    """
    known = plan.bits
    if layer and layer not in known:
        raise PlanError(
            f"{layer!r:.60} is not a layer of this plan{did_you_mean(layer, known)}; leave it out to see all layers"
        )
    yield (
        f"{_where(plan)}: a rank sends {plan.bytes_sent / 1e6:.4g} MB a step and ends {plan.exposed * 1e3:.3g} ms "
        "after the last gradient"
    )
    if plan.inside is not None:
        yield f"a node sends to other nodes {plan.bytes_between / 1e6:.4g} MB a step"
    yield f"{shares(plan)}; adds {plan.error:.2e} of a gradient's squared norm, of {plan.budget:.2e} allowed"
    if plan.bytes_kept:
        yield f"a rank keeps {plan.bytes_kept / 1e6:.4g} MB: residuals not sent yet, and factors of low rank"
    if plan.gathered and not layer:
        modules = ", ".join(f"{row.name} in {row.bits} bits" for row in plan.gathered)
        yield f"to gather the parameters once, a rank sends {plan.bytes_gathered / 1e6:.4g} MB: {modules}"
        if kept := sum(row.bytes_kept for row in plan.gathered):
            yield f"4 bits are of differences; each rank keeps {kept / 1e6:.4g} MB of parameters to add them to"
    for row in plan.layers:
        if layer in ("", row.name):
            hidden = f"{row.exposed * 1e3:.3g} ms exposed" if row.exposed else "hidden behind backward"
            what = f"{row.name}: {row.elements:,} elements, bucket {row.bucket}"
            yield f"{' ' * (row.bits < 10)}{row.way}  {what}, {hidden}, adds {row.error:.2e}"


def shares(plan: LinkPlan) -> str:
    """Return as words the share of a plan's elements that is sent in each way; the most bits first, low rank last."""
    counts = Counter[str]()
    for row in sorted(plan.layers, key=lambda row: (row.low_rank, -row.bits, row.by_nodes)):
        counts[row.way] += row.elements
    total = max(counts.total(), 1)
    return ", ".join(f"{sent / total:.0%} in {way}" for way, sent in counts.items() if sent) or "no layers"


def _where(plan: LinkPlan) -> str:
    between = f"{plan.bytes_per_second * 8e-6:.4g} Mbit/s, {plan.latency * 1e3:.3g} ms"
    if plan.inside is None:
        return f"{plan.ranks} ranks, {between}"
    inside = f"{plan.inside.bytes_per_second * 8e-6:.4g} Mbit/s, {plan.inside.latency * 1e3:.3g} ms"
    return f"{plan.ranks} ranks on {plan.ranks // plan.node} nodes, {inside} inside, {between} between"
