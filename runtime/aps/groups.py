"""Make the process groups that an exchange needs, and check that all ranks have the same options.

Making groups and comparing ranks are collective: each rank of the parent group calls these functions in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxprec.errors import ConfigError


@dataclass(frozen=True)
class SubGroups:
    """Process groups of the hierarchical all-reduce: this rank's, and that of all masters (None on other ranks)."""

    members: dist.ProcessGroup
    masters: dist.ProcessGroup | None

    @property
    def master(self) -> int:
        """Return the global rank of the master of this rank's sub-group."""
        return dist.get_global_rank(self.members, 0)


@dataclass(frozen=True)
class Node:
    """The ranks of one node, each of which owns a chunk, and the ranks of other nodes that own the same chunk."""

    rank: int
    """Number of this rank within the node, and of its chunk."""
    size: int
    scatter: dist.ProcessGroup
    gather: dist.ProcessGroup
    between: Groups


@dataclass(frozen=True)
class Groups:
    """Process groups of one exchange.

    Exponents, payload and results have a group each, so a bucket's exponents need not wait for the payload of the
    bucket before. `parts` are the groups of the hierarchical all-reduce, `node` those of an exchange by nodes; None
    without.
    """

    rank: int
    size: int
    exponents: dist.ProcessGroup
    payload: dist.ProcessGroup
    gather: dist.ProcessGroup
    parts: SubGroups | None = None
    node: Node | None = None


def parent_of(process_group: dist.ProcessGroup | None, who: str) -> dist.ProcessGroup:
    """Return the group, or the default group. Raises `ConfigError` if there is none; `who` names what needs it."""
    is_set_up = dist.is_available() and dist.is_initialized()
    parent = process_group if process_group is not None else dist.group.WORLD if is_set_up else None
    if parent is None or not is_set_up:
        raise ConfigError(f"{who} needs a process group and none is set up; call init_process_group before it")
    return parent


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout that a group was made with, or None if its backend does not have it."""
    try:
        options = group._get_backend(communication_device(group)).options
    except (AttributeError, RuntimeError):
        return None
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def communication_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of the tensors that a group exchanges."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def make_groups(parent: dist.ProcessGroup, group_size: int | None, *, by_nodes: bool = False) -> Groups:
    """Make the groups of an exchange over `parent`, with its timeout; `by_nodes`: `group_size` ranks are a node.

    Raises `ConfigError` if the ranks are no whole number of nodes.
    """
    ranks = dist.get_process_group_ranks(parent)
    timeout = timeout_of(parent)
    whole = _groups([ranks], timeout)
    rank, size = dist.get_rank(parent), len(ranks)
    if group_size is None or group_size == 1 or size == 1:
        return whole
    if by_nodes:
        return replace(whole, node=_node(ranks, rank, group_size, timeout))
    parts = [ranks[start : start + group_size] for start in range(0, size, group_size)]
    members = _own_group(parts, ranks[rank], timeout)
    heads = ranks[::group_size]
    others = [[r] for r in ranks if r not in heads]
    masters = _own_group([heads, *others], ranks[rank], timeout)
    return replace(whole, parts=SubGroups(members, masters if ranks[rank] in heads else None))


def _groups(parts: list[list[int]], timeout: timedelta | None) -> Groups:
    """Make the groups of one exchange within each of some disjoint parts; return those of this rank's part."""
    rank = dist.get_rank()
    own = next(part for part in parts if rank in part)
    exponents, payload, gather = (_own_group(parts, rank, timeout) for _ in range(3))
    return Groups(own.index(rank), len(own), exponents, payload, gather)


def _node(ranks: list[int], rank: int, size: int, timeout: timedelta | None) -> Node:
    if len(ranks) % size:
        raise ConfigError(
            f"group_size={size} does not divide {len(ranks)} ranks, and with accumulate='fp32' each node owns a bucket "
            "in equal chunks; give the ranks of one node, or leave group_size out"
        )
    nodes = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    scatter, gather = (_own_group(nodes, ranks[rank], timeout) for _ in range(2))
    alike = [list(chunk) for chunk in zip(*nodes, strict=True)]
    return Node(rank % size, size, scatter, gather, _groups(alike, timeout))


def _own_group(parts: list[list[int]], rank: int, timeout: timedelta | None) -> dist.ProcessGroup:
    """Make a group for each of some disjoint parts and return this rank's.

    Each rank must be in exactly one part: torch names a group made by its members alone by how many they have made.
    """
    world_wide = sum(map(len, parts)) == dist.get_world_size()
    made = {tuple(part): _new_group(part, timeout, world_wide) for part in parts if world_wide or rank in part}
    return next(group for part, group in made.items() if rank in part)


def _new_group(ranks: Sequence[int], timeout: timedelta | None, world_wide: bool) -> dist.ProcessGroup:
    """Make a group: by a call of all ranks of the world or, if the parts do not cover it, of its members alone."""
    new: Any = dist.new_group  # some versions of torch type it as a group or, for non-members, a number
    made: dist.ProcessGroup = new(list(ranks), timeout=timeout, use_local_synchronization=not world_wide)
    return made


def agree(
    text: str,
    group: dist.ProcessGroup,
    what: str = "APS options differ between ranks",
    way_out: str = "give every rank the same",
) -> None:
    """Raise `ConfigError` on every rank, naming two ranks that differ, unless `text` is the same on all ranks."""
    texts = gather_texts(text, group)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise ConfigError(f"{what}: rank 0 has ({texts[0]}), rank {rank} has ({other}); {way_out}")


def gather_texts(text: str, group: dist.ProcessGroup) -> list[str]:
    """Return the text of every rank of the group, in rank order."""
    device = communication_device(group)
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([data.numel()], dtype=torch.int64, device=device), group=group)
    longest = max(int(n) for n in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    rows = [torch.zeros_like(padded) for _ in range(size)]
    dist.all_gather(rows, padded, group=group)
    return [_text(row, int(n)) for row, n in zip(rows, lengths, strict=True)]


def _text(row: Tensor, length: int) -> str:
    return row[:length].cpu().numpy().tobytes().decode()
