"""List Dettmers' four 8-bit data types as tables of 128 sorted magnitudes.

Source: Dettmers 2016, section 3.1 and figure 1; the splits are those of docs/algorithms.md, "8-bit data types". A code
has one sign bit and seven bits of magnitude. To add a type, add a function that lists its magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

NUM_MAGNITUDES = 128
DYNAMIC_SPLIT = 0.45  # the author's tables split (0.1, 1) here, and each side uniformly


def _midpoints(low: float, high: float, count: int) -> list[float]:
    """Return the midpoints of `count` equal intervals of (low, high)."""
    step = (high - low) / count
    return [low + step * (k + 0.5) for k in range(count)]


def _decade_uniform(leaves: int) -> list[float]:
    return _midpoints(0.1, 1.0, leaves)


def _decade_split(leaves: int) -> list[float]:
    half = leaves // 2
    return _midpoints(0.1, DYNAMIC_SPLIT, half) + _midpoints(DYNAMIC_SPLIT, 1.0, half)


def _dynamic(decade: Callable[[int], list[float]]) -> list[float]:
    """Return 0, 1 and, for n = 0..5 leading zeros and a flag bit, 6 - n bits of tree over (0.1, 1) * 10^-n."""
    tree = [m * 10.0**-n for n in range(6) for m in decade(2 ** (6 - n))]
    return [0.0, *tree, 1.0]


def dynamic_tree() -> list[float]:
    """List magnitudes of a dynamic exponent and a bisection tree, first split at 0.45 (0.2345678 gives 0.236719)."""
    return _dynamic(_decade_split)


def dynamic_uniform() -> list[float]:
    """List magnitudes of a dynamic exponent and intervals that are split uniformly, as in bitsandbytes."""
    return _dynamic(_decade_uniform)


def static_tree() -> list[float]:
    """List magnitudes of three bits for a decade 10^-n and four for a leaf of (0.1, 1), split at 0.45; no zero."""
    return [m * 10.0**-n for n in range(8) for m in _decade_split(16)]


def mantissa() -> list[float]:
    """List magnitudes k * 10^-(n+1), three bits for the decade n and four for k; some values occur twice."""
    return [k * 10.0 ** -(n + 1) for n in range(8) for k in range(16)]


def linear() -> list[float]:
    """List magnitudes k / 127."""
    return [k / 127 for k in range(NUM_MAGNITUDES)]


TABLES: dict[str, Callable[[], Iterable[float]]] = {
    "dynamic-tree": dynamic_tree,
    "dynamic-uniform": dynamic_uniform,
    "static-tree": static_tree,
    "mantissa": mantissa,
    "linear": linear,
}

# Types that divide a tensor by its exact maximum; the others divide by a power of ten.
NORMALISED_BY_MAXIMUM = frozenset({"dynamic-tree", "dynamic-uniform", "linear"})
