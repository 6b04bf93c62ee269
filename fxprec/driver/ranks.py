"""Notices that ranks compile the same model with other options, before what they exchange says so in numbers.

Each rank leaves its options in the process group's store as it compiles, and looks at those that are there by then: no
rank waits for another, so one that compiles later, or not at all, stops none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxprec import compat
from fxprec.config import Config
from fxprec.driver.event_log import EventLog
from fxprec.driver.saved_state import Identity

LOCAL = frozenset(name for name in vars(Config) if name.startswith("dump"))  # each rank may look for itself
MOST = 64  # ranks that the first one looks at


def tell_of_other_options(config: Config, identity: Identity, log: EventLog) -> None:
    """Warn, under ``strict`` raise `FallbackError`, where a rank that compiled this model before has other options."""
    group = compat.process_group_store()
    if group is None or not identity.is_training:
        return
    rank, world, store = group
    key, own = f"fxprec/{json.dumps(identity.parameters)}", _options(config)

    def left_by(other: int) -> list[dict[str, Any]]:
        """Of every model of these parameters' names; there may be two."""
        name = f"{key}/{other}"
        return json.loads(store.get(name)) if store.check([name]) else []

    store.set(f"{key}/{rank}", json.dumps([*left_by(rank), own]))
    for other in range(1, min(world, MOST)) if rank == 0 else (0,):
        found = left_by(other)
        if found and own not in found:
            log.tell("options", _difference(rank, own, other, found[-1]))
            return


def _options(config: Config) -> dict[str, Any]:
    """Return the options; of a plan its text, since a path may be another file on another machine."""
    options = {name: value for name, value in config.to_dict().items() if name not in LOCAL}
    if config.plan is not None:
        options["plan"] = Path(config.plan).read_text(encoding="utf-8")
    return options


def _difference(rank: int, own: Mapping[str, Any], other: int, found: Mapping[str, Any]) -> str:
    name = next(name for name in own if own[name] != found.get(name))
    values = "other contents" if name == "plan" else f"{_short(own[name])} here and {_short(found.get(name))} there"
    return (
        f"rank {rank} compiles this model with other options than rank {other}: {name} has {values}; ranks that train "
        "one model should round alike: give all of them the same options"
    )


def _short(value: Any) -> str:
    value = value.get("name", value) if isinstance(value, dict) else value
    return repr(value)[:60]
