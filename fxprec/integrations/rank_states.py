"""Collect the backend states of all ranks in one object with ``state_dict`` and ``load_state_dict``.

Overflows, and so promotions and scales, differ between ranks. But a checkpoint of Accelerate, Lightning or
``torch.distributed.checkpoint`` stores the state of one rank only.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from fxprec.driver.backend import Backend
from fxprec.errors import FxprecWarning, PlanError
from fxprec.integrations.backends import backends_in
from fxprec.runtime.aps.groups import gather_texts

VERSION = 1


class RankStates:
    """The states of all backends in a model, on all ranks of a process group; also works without ``torch.distributed``.

    ``state_dict`` is a collective: call it on all ranks, as the checkpoint functions of Accelerate, Lightning and
    ``torch.distributed.checkpoint`` do. If only one rank saves, save that rank's `Backend.state_dict` instead.
    """

    def __init__(self, model: object, group: dist.ProcessGroup | None = None) -> None:
        self._model, self._group = model, group
        backends_in(model)  # raises for a model without a backend now, not at the first checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return plain data, equal on all ranks, with the same keys before and after compilation. A collective."""
        return _packed(self._gathered(self._own_text()))

    def own_state_dict(self) -> dict[str, Any]:
        """Return this rank's state only, in the form of `state_dict`, without a collective."""
        return _packed([self._own_text()])

    def _own_text(self) -> str:
        return json.dumps({name: _unfolded(backend) for name, backend in backends_in(self._model).items()})

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load this rank's part of a saved state; warn if the state was saved by another number of ranks.

        Raises `PlanError` for data that is not such a state, and for another model's state.
        """
        saved = _unpacked(state)
        backends = backends_in(self._model)
        rank, world = self._place
        own = saved[rank] if rank < len(saved) else saved[0]
        if own.keys() != backends.keys():
            raise PlanError(
                f"the saved state is of compiled modules {_listed(own)}, this model has {_listed(backends)}; compile "
                "the same ones before loading"
            )
        if len(saved) != world:
            warnings.warn(
                f"saved by {len(saved)} ranks, loaded by {world}: ranks beyond the saved ones take the "
                "promotions and scales of rank 0, and training does not continue bit for bit",
                FxprecWarning,
                stacklevel=2,
            )
        for name, backend in backends.items():
            backend.load_state_dict(own[name])

    @property
    def _place(self) -> tuple[int, int]:
        """Return this rank's number, and the number of ranks."""
        if not dist.is_available() or not dist.is_initialized():
            return 0, 1
        return dist.get_rank(self._group), dist.get_world_size(self._group)

    def _gathered(self, own: str) -> list[str]:
        if self._place[1] == 1:
            return [own]
        group = self._group or dist.group.WORLD
        assert group is not None, "several ranks have a group"
        return gather_texts(own, group)


def _unfolded(backend: Backend) -> dict[str, Any]:
    """Return a backend's state with its JSON text parsed: nested in JSON again, the text would need escaping."""
    state = backend.state_dict()
    return {**state, "graphs": json.loads(state["graphs"])}


def _packed(texts: Sequence[str]) -> dict[str, object]:
    """Return the states as one text, equal ones once: `torch.distributed.checkpoint` loads only into existing keys."""
    distinct = list(dict.fromkeys(texts))
    ranks = json.dumps([distinct.index(text) for text in texts])
    return {"version": VERSION, "ranks": f'{{"state_of_rank": {ranks}, "states": [{", ".join(distinct)}]}}'}


def _unpacked(state: object) -> list[dict[str, Any]]:
    """Return each rank's states by module name. Raises `PlanError` for data that is not such a state."""
    try:
        if not isinstance(state, Mapping) or state["version"] != VERSION:
            raise TypeError
        ranks = json.loads(state["ranks"])
        states = [ranks["states"][i] for i in ranks["state_of_rank"]]
        if not states or not all(isinstance(s, dict) for s in states):
            raise TypeError
        return states
    except (KeyError, TypeError, ValueError, IndexError, RecursionError):
        raise PlanError(
            f"this is not a state of fxprec.integrations.RankStates version {VERSION}, or a damaged one; pass what its "
            "state_dict() returned"
        ) from None


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(repr(name) if name else "the whole model" for name in names) or "none"
