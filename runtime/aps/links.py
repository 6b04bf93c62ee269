"""Describe the two kinds of link between ranks: inside of a node, and between nodes."""

from __future__ import annotations

from dataclasses import dataclass

from fxprec.errors import ConfigError
from fxprec.runtime.aps.predict import Link, parse_rate, parse_seconds

CHANGED = 1.25
"""A rate that differs by this factor counts as another link."""


@dataclass(frozen=True)
class Links:
    """How fast ranks reach each other. Without nodes each rank is a node."""

    between: Link
    """One node's link to the other nodes, which its ranks share."""
    inside: Link | None = None
    """One rank's link to the other ranks of its node."""
    node: int = 1
    """Ranks of a node."""
    exchange: float = 0.0
    """Seconds that cores work on an exchange of few bytes."""

    def differ(self, last: Links) -> bool:
        """Return whether a rate has changed since `last`."""
        pairs = [(self.between, last.between)]
        if self.inside is not None and last.inside is not None:
            pairs.append((self.inside, last.inside))
        return not all(1 / CHANGED < new.bytes_per_second / old.bytes_per_second < CHANGED for new, old in pairs)

    def __str__(self) -> str:
        between = f"{_mbit(self.between)} Mbit/s"
        return between if self.inside is None else f"{between} between and {_mbit(self.inside)} Mbit/s inside of nodes"


def _mbit(link: Link) -> str:
    return f"{link.bytes_per_second * 8e-6:.4g}"


def parse_links(text: str, node: int | None) -> Links:
    """Return the links of a text such as ``50Mbit/s, 1ms between; 2Gbit/s inside``, or of one rate without nodes.

    Raises `ConfigError` for another text.
    """
    if node is None or node == 1:
        return Links(_link(text))
    kinds = {}
    for part in text.split(";"):
        rate, _, kind = part.strip().rpartition(" ")
        kinds[kind] = rate
    if set(kinds) != {"between", "inside"}:
        raise ConfigError(
            f"APS link={text!r} must say both kinds of link of group_size={node}, such as '50Mbit/s, 1ms between; "
            "2Gbit/s inside': a node's to the others, and a rank's inside of its node"
        )
    return Links(_link(kinds["between"]), _link(kinds["inside"]), node)


def _link(text: str) -> Link:
    rate, _, latency = text.partition(",")
    return Link(parse_rate(rate), parse_seconds(latency) if latency else 0.0)
