"""The versions of torch and Triton that this release was tested with, and the warning for newer ones."""

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
    """Return the major and minor version of a text such as "2.15.0+cu132" or "3.10.0a0+git1234"."""
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


MAXIMUM_KEEPS_NAN = torch_version() >= (2, 14)
"""Whether Inductor's minimum and maximum on a GPU propagate NaN within the instruction itself."""


def words(version: Version) -> str:
    """Return a version as text: ``2.13``."""
    return ".".join(map(str, version))


def newer_than_tried() -> list[str]:
    """Return one line for each of torch and Triton that is newer than the versions this release was tested with."""
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
