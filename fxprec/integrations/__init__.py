"""Support for trainers and tools: compile, save, resume, log and export (docs/integrations.md).

``fxprec.integrations.huggingface`` and ``.lightning`` each have a callback, ``.torchtitan`` has a converter. Only these
modules import their trainer's package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxprec.driver.named import register_backend as register_backend
    from fxprec.integrations.backends import backends_in as backends_in
    from fxprec.integrations.backends import compile_layers as compile_layers
    from fxprec.integrations.compressed_tensors import from_compressed_tensors as from_compressed_tensors
    from fxprec.integrations.compressed_tensors import to_compressed_tensors as to_compressed_tensors
    from fxprec.integrations.log_to import log_to as log_to
    from fxprec.integrations.rank_states import RankStates as RankStates
    from fxprec.integrations.statistics import log_statistics as log_statistics
    from fxprec.integrations.statistics import summary as summary

_HOMES = {
    "RankStates": "integrations.rank_states",
    "backends_in": "integrations.backends",
    "compile_layers": "integrations.backends",
    "from_compressed_tensors": "integrations.compressed_tensors",
    "log_to": "integrations.log_to",
    "log_statistics": "integrations.statistics",
    "register_backend": "driver.named",
    "summary": "integrations.statistics",
    "to_compressed_tensors": "integrations.compressed_tensors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"fxprec.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'fxprec.integrations' has no attribute {name!r}")
