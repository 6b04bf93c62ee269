"""Keep averages in an optimizer's state: create them at the first step, convert their form, put them in state dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxprec.runtime.optim import states
from fxprec.runtime.optim.local import in_order_of, is_permuted, local
from fxprec.runtime.optim.options import rule_of
from fxprec.runtime.optim.rule import Algorithm, Rule, scale_name


def hold(rule: Rule, name: str, param: Tensor, state: dict[str, Any]) -> None:
    """Create an average that is missing, or convert one in another form into the rule's form."""
    if state.get(name) is None:
        _add(rule, name, param, state, None)
    elif not _fits(rule, name, param, state):
        _add(rule, name, param, state, plain(name, param, state))


def _fits(rule: Rule, name: str, param: Tensor, state: Mapping[str, Any]) -> bool:
    held = state[name]
    if held.dtype != rule.dtype_of(name):
        return False
    if name not in rule.coded:
        return True
    if name in rule.packed:
        return bool(state[order_name(name)] == _order(local(param)))
    here, codes = local(param), local(held)
    return codes.stride() == here.stride() if is_permuted(here) else codes.is_contiguous()


def _add(rule: Rule, name: str, param: Tensor, state: dict[str, object], value: Tensor | None) -> None:
    """Create an average in the rule's form with this value; None: 0."""
    state.pop(scale_name(name), None)
    state.pop(order_name(name), None)
    here = local(param)
    if name in rule.packed:
        size = rule.size_of(name, here.numel())
        made = torch.zeros(size, dtype=rule.dtype_of(name), device=here.device)
        state[name], state[order_name(name)] = made, _order(here)
        _encode(rule, name, here, state, value)
        return
    ordered = torch.preserve_format if is_permuted(here) or name not in rule.coded else torch.contiguous_format
    made = torch.zeros_like(here, dtype=rule.dtype_of(name), memory_format=ordered)
    state[name] = _as(made, param)
    if name in rule.coded:
        _encode(rule, name, here, state, value)
    elif value is not None:
        made.copy_(local(value))


def _encode(rule: Rule, name: str, here: Tensor, state: dict[str, Any], value: Tensor | None) -> None:
    """Create an average's scales, and encode a value into both. ``here``: this rank's part of the parameter."""
    blocks = states.num_blocks(here.numel())
    scales = state[scale_name(name)] = torch.zeros(blocks, dtype=torch.uint8, device=here.device)
    if value is not None:
        codes, found = states.encode(rule.codes(name), in_order_of(local(value).float(), here))
        _flat(local(state[name])).view(torch.uint8).copy_(codes)
        scales.copy_(found)


def order_name(name: str) -> str:
    """Return the state key of the strides that packed codes follow."""
    return f"{name}_order"


def _order(here: Tensor) -> tuple[int, ...]:
    """Return the strides that `in_order_of` follows; () for the order of the elements."""
    return here.stride() if is_permuted(here) else ()


def plain(name: str, param: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Return an average as numbers: codes as bfloat16, which represents them exactly, anything else unchanged."""
    held: Tensor = state[name]
    scales = state.get(scale_name(name))
    if scales is None:
        return held
    here, codes, order = local(param), local(held), state.get(order_name(name))
    form = "8bit" if order is None else "4bit"
    if order is None:
        numbers = torch.empty_like(codes, dtype=torch.bfloat16)
    else:
        numbers = torch.empty(here.shape, dtype=torch.bfloat16, device=here.device)
        numbers = numbers.as_strided(here.shape, order) if order else numbers
    _flat(numbers).copy_(states.decode(states.codes_of(form, name), _flat(codes), scales, here.numel()))
    return _as(numbers, param)


def _flat(t: Tensor) -> Tensor:
    """Return a flat view of a tensor without gaps, in the order of its memory."""
    return t.as_strided((t.numel(),), (1,))


def _as(t: Tensor, like: Tensor) -> Tensor:
    """Return ``t``, this rank's shard, as a DTensor that is sharded like ``like``; unchanged if that is no DTensor."""
    if not isinstance(like, DTensor):
        return t
    return DTensor.from_local(t, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


def for_state_dict(param: Tensor, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return one parameter's state with codes decoded to numbers, and without scales and orders."""
    own = {of(name) for name in state for of in (scale_name, order_name)} & state.keys()
    return {name: plain(name, param, state) for name in state if name not in own} if own else state


def _saved_states(
    state_dict: Mapping[str, Any], groups: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], Tensor, Mapping[str, Any]]]:
    """Yield (group, parameter, saved state) for each parameter that has a state in a state dict."""
    for saved, group in zip(state_dict["param_groups"], groups, strict=True):
        for number, param in zip(saved["params"], group["params"], strict=True):
            if number in state_dict["state"]:
                yield group, param, state_dict["state"][number]


def hold_saved(
    state_dict: Mapping[str, Any],
    groups: list[dict[str, Any]],
    of: Mapping[Tensor, dict[str, Any]],
    algorithm: Algorithm,
) -> None:
    """Hold saved averages in their group's form, in the states ``of`` parameters.

    They are read from ``state_dict``, because torch.optim has converted its own copy to the weights' dtype.
    """
    for group, param, saved in _saved_states(state_dict, groups):
        rule, state = rule_of(group, algorithm, param.dtype), of[param]
        for name in rule.averages if rule.states is not None else ():
            if saved.get(name) is not None:
                state[name] = saved[name].to(param.device)
                hold(rule, name, param, state)
