"""Implement what all optimizers share: state, checks, and one kernel call for all parameters of a group."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

from fxprec.errors import FxprecWarning
from fxprec.runtime import on_device
from fxprec.runtime.optim import guards, running, scalars, sums
from fxprec.runtime.optim.applied import is_held, refuse_applied_by_another
from fxprec.runtime.optim.cancelled import By, CancelledRow, CancelledSteps, Counts, History, by_layer
from fxprec.runtime.optim.clipping import Clipping
from fxprec.runtime.optim.held import for_state_dict, hold, hold_saved
from fxprec.runtime.optim.local import local, place_of
from fxprec.runtime.optim.options import check_group, check_one_norm, name_of, rule_of
from fxprec.runtime.optim.rule import AUTO, LAST, Algorithm, Rule, States
from fxprec.runtime.optim.sums import SummedGradient, stored


@dataclass(frozen=True)
class _Position:
    """The position of a parameter in the param groups."""

    group: int
    index: int
    """Index in its group."""
    number: int
    """Index among the parameters of all groups."""


@dataclass(frozen=True)
class _Batch:
    """The parameters of one group that have a gradient."""

    indices: list[int]
    rows: list[list[Tensor]]
    """For each parameter, the tensors of `Rule.tensors` and `Rule.scales`."""
    steps: list[Tensor]
    counts: list[Tensor]


@dataclass(frozen=True)
class Numbers:
    """The numbers that a step of some parameters depends on, beside their tensors and their group."""

    steps: Tensor
    """float32 (parameters,), counted from 1."""
    integers: Tensor
    """int32 (parameters, `INTEGERS`)."""
    clips: Tensor | None
    """float32 (parameters,): the clipping factor of each gradient."""

    def of(self, i: int) -> Numbers:
        """Return the numbers of one parameter."""
        one = slice(i, i + 1)
        return Numbers(self.steps[one], self.integers[one], None if self.clips is None else self.clips[one])


class Stepper(Optimizer):
    """A mixin before an optimizer of torch.optim, whose constructor, groups and state it uses; the base of `Lion`."""

    _algorithm: Algorithm
    _own: dict[str, Any]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch.optim does. Raises `ConfigError` for what docs/optim.md says is refused."""
        self.defaults |= self.__dict__.pop("_own", {})  # the constructor of torch.optim knows its own options only
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1], len(self.param_groups) - 1)
            check_one_norm(self.param_groups)
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any], position: int) -> None:
        check_group(group, position)

    def workspace_of(self, param: Tensor) -> int:
        """Return the bytes that a step of one parameter allocates beside the tensors that it reads and writes."""
        return 0

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; return the closure's loss, if one is given.

        Raises `GradientError`, before anything is changed, if ``error_if_nonfinite`` is set and a gradient is not
        finite, or if backward has stepped a parameter by another optimizer; `ConfigError` for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_groups()
        return loss

    @torch.compiler.disable(reason="one kernel of our own for all parameters; tracing them takes a minute for four")
    def _step_groups(self) -> None:
        refuse_applied_by_another(self)
        guards.check_gradients(self.param_groups)
        for group in self.param_groups:
            if group["max_norm"] is not None:
                held = [param for param in group["params"] if is_held(param.grad)]
                self._clipping.see(held, [stored(param.grad) for param in held])
        first = 0
        for position, group in enumerate(self.param_groups):
            self._step_group(position, group, first)
            first += len(group["params"])
        self._clipping.finish(self.param_groups)
        every = [g["count_cancelled"] for g in self.param_groups if type(g["count_cancelled"]) is int]
        if any(every):
            self._history.note(self._counts(), min(n for n in every if n))

    @torch.no_grad()
    def step_one(self, param: Tensor, gradient: Tensor) -> None:
        """Step one parameter of this optimizer by a gradient that is not at its ``grad``, as `step` would."""
        at = self.position_of(param)
        assert at is not None, "its holder steps it"
        group = self.param_groups[at.group]
        rule = rule_of(group, self._algorithm, param.dtype)
        if rule.update == "nearest" and rule.algorithm != "sgd" and not group.get("capturable"):
            self._warn_if_stuck(rule, group, at.group, range(len(group["params"])))
        if rule.clipped:  # the bits of a norm depend on strides and dtype
            if gradient.stride() != param.stride() or gradient.dtype != param.dtype:
                gradient = torch.empty_like(param).copy_(gradient)
            self._clipping.see([param], [gradient])
        self._step_batch(rule, group, self._batch(rule, group, [at.index], gradient), at.number - at.index)

    def forget_positions(self) -> None:
        """Number the parameters anew: users may have changed a group's list."""
        self.__dict__.pop("_positions", None)

    def position_of(self, param: Tensor) -> _Position | None:
        """Return the position of a parameter in the param groups, or None if no group has it."""
        known: dict[Tensor, _Position] = self.__dict__.get("_positions", {})
        at, groups = known.get(param), self.param_groups
        if at is not None and at.group < len(groups):
            params = groups[at.group]["params"]
            if at.index < len(params) and params[at.index] is param:
                return at
        numbers = count()
        self.__dict__["_positions"] = found = {
            p: _Position(g, i, next(numbers)) for g, group in enumerate(groups) for i, p in enumerate(group["params"])
        }
        return found.get(param)

    def _step_group(self, position: int, group: dict[str, Any], first: int) -> None:
        by_kind: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
        for index, param in enumerate(group["params"]):
            if is_held(param.grad):
                is_sum = isinstance(param.grad, SummedGradient)
                by_kind.setdefault((param.device, param.dtype, is_sum), []).append(index)
        if group["gradients"] is not None and by_kind and not any(is_sum for _, _, is_sum in by_kind):
            self._warn_of_wide_gradients(group, position, next(iter(by_kind.values()))[0])
        for (_, dtype, is_sum), indices in by_kind.items():
            rule = rule_of(group, self._algorithm, dtype)
            rule = replace(rule, gradient=torch.bfloat16) if is_sum and dtype != torch.bfloat16 else rule
            batch = self._batch(rule, group, indices)
            if rule.update == "nearest" and not group.get("capturable"):
                self._warn_if_stuck(rule, group, position, indices)
            self._step_batch(rule, group, batch, first)

    def _warn_if_stuck(self, rule: Rule, group: Mapping[str, Any], position: int, indices: Sequence[int]) -> None:
        looked_at = self.__dict__.setdefault("_looked_at", set())
        if position not in looked_at:
            looked_at.add(position)
            guards.warn_if_stuck(rule, group, position, indices)

    def _warn_of_wide_gradients(self, group: Mapping[str, Any], position: int, index: int) -> None:
        told = self.__dict__.setdefault("_told_of_wide_gradients", set())
        if position not in told:
            told.add(position)
            param = group["params"][index]
            warnings.warn(
                f"gradients='bf16' of group {position} holds none in bf16: the gradient of {name_of(group, index)} is "
                f"a plain {str(param.grad.dtype)[6:]} tensor; compile the model with options={{'optimizer': "
                f"optimizer}}, whose warnings name the parameters that it cannot do this for",
                FxprecWarning,
                stacklevel=5,
            )

    @torch.no_grad()
    def add_gradient(self, param: Tensor, gradient: Tensor) -> None:
        """Add a gradient to the parameter's bfloat16 sum at ``param.grad``."""
        at = self.position_of(param)
        assert at is not None, "its holder adds to it"
        held = param.grad if isinstance(param.grad, SummedGradient) else SummedGradient.of(param)
        step = self.state.get(param, {}).get("step")
        sums.add(held, gradient, self.param_groups[at.group], (at.number, *place_of(param)), step)
        param.grad = held

    def sums_gradients(self, param: Tensor) -> bool:
        """Return whether a parameter's gradients are summed in bfloat16 until `step`."""
        at = self.position_of(param)
        return at is not None and self.param_groups[at.group]["gradients"] is not None

    def gradient_bytes(self) -> int:
        """Return the bytes of the bfloat16 sums of gradients of all parameters."""
        groups = (group for group in self.param_groups if group["gradients"] is not None)
        return sum(2 * local(p).numel() for group in groups for p in group["params"])

    def _batch(
        self, rule: Rule, group: Mapping[str, Any], indices: list[int], gradient: Tensor | None = None
    ) -> _Batch:
        rows, steps, counts = [], [], []
        for index in indices:
            param = group["params"][index]
            state = self.state[param]
            self._fill_state(rule, group, param, state)
            held = (state[name] for name in (*rule.state, *rule.scales))
            rows.append([param, stored(param.grad) if gradient is None else gradient, *held])
            if "step" in state:
                steps.append(state["step"])
            if rule.statistics:
                counts.append(state["update_counts"])
        return _Batch(indices, rows, steps, counts)

    @staticmethod
    def _fill_state(rule: Rule, group: Mapping[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        """Add missing state: all of it at the first step, or what torch.optim lacks after its state was loaded."""
        had_momentum = state.get("momentum_buffer") is not None
        for name in rule.averages:
            hold(rule, name, param, state)
        if rule.kahan and state.get("compensation") is None:
            state["compensation"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        if "step" not in state and (rule.state or rule.stochastic or group["gradients"] is not None):
            on_device = group.get("capturable") or group.get("fused")
            device = param.device if on_device else torch.device("cpu")
            state["step"] = torch.tensor(float(had_momentum), dtype=torch.float32, device=device)
        if rule.statistics and "update_counts" not in state:
            state["update_counts"] = torch.zeros(2, dtype=torch.int64, device=param.device)

    def _step_batch(self, rule: Rule, group: Mapping[str, Any], batch: _Batch, first: int) -> None:
        if batch.steps:
            torch._foreach_add_(batch.steps, 1)
            steps = torch.stack(batch.steps)
        else:
            steps = torch.zeros(len(batch.rows), dtype=torch.float32, device="cpu")
        params = [row[0] for row in batch.rows]
        places = [(first + i, *place_of(param)) for i, param in zip(batch.indices, params, strict=True)]
        integers = scalars.integers(group["seed"], places if rule.random else None, steps)
        clips = self._clipping.factors(group, params) if rule.clipped else None
        self._run(rule, group, batch.rows, Numbers(steps, integers, clips), batch.counts)

    def _run(
        self, rule: Rule, group: Mapping[str, Any], rows: list[list[Tensor]], numbers: Numbers, counts: list[Tensor]
    ) -> None:
        """Step rows of tensors in place."""
        floats = scalars.floats(rule, group, numbers.steps)
        if numbers.clips is not None and rule.clipped:
            floats = on_device.upload(floats, rows[0][0].device)
            floats[:, rule.scalars.index("clip")] = numbers.clips
        running.run(rule, group, rows, floats, numbers.integers, counts)

    @property
    def _clipping(self) -> Clipping:
        result: Clipping = self.__dict__.setdefault("_norms_of_the_step", Clipping())
        return result

    @property
    def clips_by_this_step(self) -> bool:
        """Return whether all gradients must exist before any parameter is stepped, to clip them by this step's norm."""
        return any(group["max_norm"] is not None and group["norm"] != LAST for group in self.param_groups)

    def last_norm(self) -> Tensor | None:
        """Return the global norm of the last step's gradients before clipping, float32, on their device.

        None before the first step, and if nothing is clipped.
        """
        found: Tensor | None = self.param_groups[0]["last_norm"]
        return found

    @property
    def _history(self) -> History:
        result: History = self.__dict__.setdefault("_cancelled_history", History())
        return result

    def _counts(self) -> Counts:
        """Return the counts of the groups with ``count_cancelled``, by group and position."""
        found = {}
        for position, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                counts = self.state[param].get("update_counts") if param in self.state else None
                if counts is not None:
                    found[position, index] = counts
        return found

    def _rows(self, counts: Mapping[tuple[int, int], tuple[int, int]], by: By) -> list[CancelledRow]:
        names = {(g, i): name_of(self.param_groups[g], i) for g, i in counts}
        rows = [CancelledRow(*key, names[key], *found) for key, found in counts.items()]
        return by_layer(rows) if by == "layer" else rows

    def cancelled(self, *, reset: bool = False, by: By = "parameter") -> list[CancelledRow]:
        """Return the updates that rounding cancelled, for each parameter of the groups with ``count_cancelled``.

        ``by="layer"`` adds up the parameters of each module and needs named parameters. Counts run since the last
        ``reset`` (or load). Source: Zamirai et al. 2020, D.3. Waits for the device. Raises `ConfigError`.
        """
        counts = self._counts()
        rows = self._rows({key: (int(c[0]), int(c[1])) for key, c in counts.items()}, by)
        if reset:
            for c in counts.values():
                c.zero_()
            self._history.begin_again()
        return rows

    def cancelled_over_time(self, *, by: By = "parameter") -> list[CancelledSteps]:
        """Return the updates cancelled in every ``count_cancelled`` steps, for groups where that is a number of steps.

        Source: Zamirai et al. 2020, Figure 9. Waits for the device. Raises `ConfigError`.
        """
        return [CancelledSteps(step, self._rows(counts, by)) for step, counts in self._history.read()]

    @property
    def has_open_states(self) -> bool:
        """Return whether a param group leaves the form of its averages to a step budget."""
        return any(group["states"] == AUTO for group in self.param_groups)

    def close_states(self, form: States) -> None:
        """Keep the averages of groups that left their form open in ``form`` from now on, existing averages too."""
        for group in self.param_groups:
            if group["states"] == AUTO:
                group["states"] = form

    def state_bytes(self, form: States | None = None, *, of_all: bool = False) -> int:
        """Return the bytes of the states of all parameters, or of this rank's shards, even before the first step.

        ``form``: count it for groups that leave the form open, with ``of_all`` for all groups. None: count the form of
        each group.
        """
        forms = (
            form if form and (of_all or group["states"] == AUTO) else group["states"] for group in self.param_groups
        )
        groups = ({**group, "states": found} for group, found in zip(self.param_groups, forms, strict=True))
        pairs = ((group, param) for group in groups for param in group["params"])
        return sum(
            rule_of(group, self._algorithm, param.dtype).bytes_of(local(param).numel()) for group, param in pairs
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch.optim's layout. Averages in 8 or 4 bits become bfloat16, which is exact."""
        found = super().state_dict()
        pairs = zip(found["param_groups"], self.param_groups, strict=True)
        params = {key: p for saved, group in pairs for key, p in zip(saved["params"], group["params"], strict=True)}
        return {
            **found,
            "state": {
                key: for_state_dict(params[key], state) if key in params else state
                for key, state in found["state"].items()
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch.optim's. Options that the state does not name stay as they are.

        Averages are converted to the form in ``states``; `cancelled` counts start again. Raises `ConfigError` for
        options that `add_param_group` refuses; the optimizer is then as it was.
        """
        before = self.state, self.param_groups
        super().load_state_dict(state_dict)
        try:
            self._adopt_saved(before[1])
            hold_saved(state_dict, self.param_groups, self.state, self._algorithm)
        except Exception:
            self.state, self.param_groups = before
            raise
        for state in self.state.values():
            state.pop("update_counts", None)
        self.__dict__.pop("_cancelled_history", None)

    def _adopt_saved(self, before: list[dict[str, Any]]) -> None:
        """Give the loaded groups the options that the state does not name, and check them."""
        for position, (group, own) in enumerate(zip(self.param_groups, before, strict=True)):
            for name in self.defaults:
                group.setdefault(name, own[name])
            if group["states"] == AUTO:  # a step budget may have chosen a form in this process
                group["states"] = own["states"]
            self._check_group(group, position)
        check_one_norm(self.param_groups)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["differentiable"] = False
