"""Which versions of torch and Triton this release was tried with, and what is said of newer ones."""

from __future__ import annotations

import contextlib

import torch

Version = tuple[int, int]

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)


def torch_version() -> Version:
    """Return torch's major and minor version."""
    return version_of(torch.__version__)


def version_of(text: str) -> Version:
    """Return major and minor of "2.15.0+cu132" or "3.10.0a0+git1234"."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


MAXIMUM_KEEPS_NAN = torch_version() >= (2, 14)
"""Whether Inductor's minima and maxima on a GPU keep NaN in the instruction itself."""


def words(version: Version) -> str:
    """Return a version as text: ``2.13``."""
    return ".".join(map(str, version))


def newer_than_tried() -> list[str]:
    """Say of torch and of Triton, in a line each, where it is newer than this release was tried with."""
    ranges = [("torch", torch.__version__, OLDEST_TORCH, NEWEST_TORCH)]
    with contextlib.suppress(ImportError):
        import triton

        ranges.append(("triton", triton.__version__, OLDEST_TRITON, NEWEST_TRITON))
    return [
        f"{name} {found} is newer than any this fxprec was tried with ({words(oldest)} to {words(newest)}); where "
        f"something fails, install a newer fxprec or {name}<{words((newest[0], newest[1] + 1))}"
        for name, found, oldest, newest in ranges
        if version_of(found) > newest
    ]
