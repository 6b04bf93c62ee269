"""The five papers, their tables in order, and the table behind a name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import util
from types import ModuleType

TABLES = "benchmarks.papers.tables"


@dataclass(frozen=True)
class Paper:
    """What is cited, and the tables of it that are run again."""

    title: str
    source: str
    tables: tuple[str, ...]


PAPERS = {
    "assignments": Paper(
        "Training with Mixed-Precision Floating-Point Assignments",
        "Lee, Sharma and Aiken, TMLR 2023",
        ("structure", "tradeoff", "beyond", "order", "promotion", "overflow", "choose"),
    ),
    "scaling": Paper(
        "Reducing Underflow in Mixed Precision Training by Gradient Scaling",
        "Zhao, Vogel, Ahmed and Luk, IJCAI 2020",
        ("theorems", "resnet", "detector", "segmentation", "layers"),
    ),
    "aps": Paper(
        "Auto-Precision Scaling for Distributed Deep Learning",
        "Han, Demmel, Si and You, 2020",
        ("table4", "lars", "segmentation", "nodes256", "roundoff", "time"),
    ),
    "cpd": Paper(
        "Auto-Precision Scaling: CPD, arithmetic at any precision",
        "Han, Demmel, Si and You, 2020, sections 3.3.1 and 5",
        ("examples",),
    ),
    "approx": Paper(
        "8-Bit Approximations for Parallelism in Deep Learning",
        "Dettmers, ICLR 2016",
        ("errors", "mnist", "cifar", "speedup", "codec"),
    ),
    "bf16": Paper(
        "Revisiting BFloat16 Training",
        "Zamirai, Zhang, Aberger and De Sa, 2020",
        ("bottleneck", "applications", "theory", "tradeoff", "cancelled", "formats", "memory"),
    ),
}

NAMES = tuple(f"{paper}.{table}" for paper, entry in PAPERS.items() for table in entry.tables)


def is_built(name: str) -> bool:
    """Whether the table has a file."""
    return util.find_spec(_module(name)) is not None


def built() -> list[str]:
    """Names of the tables that have a file, in the papers' order."""
    return [name for name in NAMES if is_built(name)]


def load(name: str) -> ModuleType:
    """The table's module: TITLE, SOURCE, PUBLISHED, SMALLER, DEVIATES, SEEDS, run, CLAIMS and perhaps draw."""
    return importlib.import_module(_module(name))


def _module(name: str) -> str:
    return f"{TABLES}.{name.replace('.', '_')}"
