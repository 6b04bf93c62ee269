"""Keep the state of the APS communication hook: options, process groups, step count, residuals."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fxprec.errors import ConfigError
from fxprec.numerics.formats import Format
from fxprec.runtime.aps.by_link import ByLink
from fxprec.runtime.aps.codecs import Codec
from fxprec.runtime.aps.differences import Differences
from fxprec.runtime.aps.groups import Groups, agree, make_groups, parent_of
from fxprec.runtime.aps.link_plan import LinkPlan
from fxprec.runtime.aps.link_widths import FOUR_BITS
from fxprec.runtime.aps.low_rank import Late, Memory
from fxprec.runtime.aps.options import Accumulate, APSOptions, Bits, Rounding, Scaling
from fxprec.runtime.aps.rotation import signs_of
from fxprec.runtime.aps.wire import Coding, FloatWire, Sending, wire_of

KeepHigh = Iterable[str | nn.Module | Tensor]


class APSState:
    """State for ``ddp.register_comm_hook(state, aps_hook)``: gradients cross the network in 8 bits.

    Construct the state after ``init_process_group``, on every rank of `process_group`, with the same options. Ranks
    compare their options; if they differ, each rank raises a `ConfigError` that names both. `APSOptions` describes the
    options.

    `format`: a `Format`, a codec, or the name of either. `keep_high`: modules, parameters, or name patterns (then with
    `model`) whose gradients stay in their own dtype; the paper advises the last classifier.

    With ``bits="by link"``, `weights` has the weights of layers' rounding errors by name or pattern (1 if left out),
    and `plan` is the plan to begin with. ``state.by_link`` has the plan in force and its events.
    """

    def __init__(
        self,
        format: str | Format | Codec = "e5m2",
        *,
        accumulate: Accumulate = "fp32",
        group_size: int | None = None,
        keep_high: KeepHigh = (),
        model: nn.Module | None = None,
        high_steps: int = 0,
        high_epochs: int = 0,
        rounding: Rounding = "nearest",
        error_feedback: bool = False,
        scaling: Scaling = "aps",
        seed: int = 0,
        bits: Bits = "by format",
        link: str | None = None,
        error_budget: float = 1 / 32,
        widths: tuple[int, ...] = (32, 16, 8, 4),
        low_rank: int = 0,
        weights: Mapping[str, float] | None = None,
        plan: LinkPlan | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.wire = wire_of(format)
        self.options = APSOptions(
            format=self.wire.name,
            accumulate=accumulate,
            group_size=group_size,
            rounding=rounding,
            error_feedback=error_feedback,
            high_steps=high_steps,
            high_epochs=high_epochs,
            scaling=scaling,
            seed=seed,
            bits=bits,
            link=link,
            error_budget=error_budget,
            widths=widths,
            low_rank=low_rank,
        )
        if self.wire.block > 1 and (accumulate != "fp32" or scaling != "aps"):
            raise ConfigError(
                f"APS format={self.wire.name!r} scales each block by itself and is added in float32; leave out "
                f"accumulate={accumulate!r} and scaling={scaling!r}, or choose a format without blocks"
            )
        self._kept = WeakTensorKeyDictionary()
        for parameter in _parameters(keep_high, model):
            self._kept[parameter] = True
        self.step = self.first_step = 0
        self.calls: Counter[object] = Counter()  # under FSDP2: each reduce-scatter's calls since `first_step`
        self.epoch = 0
        self.memory = Memory(seed)
        self._differences: dict[str, Differences] = {}
        self.late = Late()
        self.groups = self._meet(process_group)
        self.workers: list[ThreadPoolExecutor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.by_link = self._planned_by_link(model, weights, plan)

    @property
    def residuals(self) -> WeakTensorKeyDictionary:
        """Return this rank's residual of each parameter's gradients (elements,): what was not sent yet."""
        return self.memory.residuals

    def _planned_by_link(
        self, model: nn.Module | None, weights: Mapping[str, float] | None, plan: LinkPlan | None
    ) -> ByLink | None:
        chosen = self.options
        if chosen.bits != "by link":
            if weights is not None or plan is not None:
                raise ConfigError(
                    "weights= and plan= apply only with bits='by link'; add bits='by link', or leave them out"
                )
            return None
        if model is None or not isinstance(self.wire, FloatWire) or self.wire.code_bytes != 1:
            raise ConfigError(
                f"bits='by link' needs model=, for the layers' names, and a number format of 8 bits (format is "
                f"{self.wire.name!r}); pass both"
            )
        codings: dict[int, Coding] = {32: None, 16: torch.bfloat16, 8: self.wire, 4: wire_of(FOUR_BITS)}
        return ByLink(
            {p: _plain_name(name) for name, p in model.named_parameters() if p not in self._kept},
            {bits: codings[bits] for bits in chosen.widths},
            self.groups,
            chosen,
            self.memory,
            weights,
            plan,
        )

    def _meet(self, process_group: dist.ProcessGroup | None) -> Groups:
        parent = parent_of(process_group, "APSState")
        kept = [tuple(p.shape) for p in self._kept]
        agree(f"{self.options.text()}, keep_high={sorted(kept)}", parent)
        size = self.options.group_size
        if self.options.bits == "by link" and size == dist.get_world_size(parent):
            size = None  # one node, so nothing lies between nodes
        return make_groups(parent, size, by_nodes=self.options.accumulate == "fp32")

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of a GPU on which gradients are exchanged beside the backward pass."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def keeps_high(self, parameter: Tensor) -> bool:
        """Return whether this parameter's gradient stays in its own dtype."""
        return parameter in self._kept

    @property
    def keeps_any(self) -> bool:
        """Return whether any parameter was named in `keep_high`."""
        return len(self._kept) > 0

    def is_high(self, step: int) -> bool:
        """Return whether the schedule sends all gradients of this step in their own dtype."""
        return step < self.options.high_steps or self.epoch < self.options.high_epochs

    def sending_of(self, parameter: Tensor) -> Sending:
        """Return how this parameter's gradient is sent in this step."""
        if self.is_high(self.step) or self.keeps_high(parameter):
            return Sending(None)
        if self.by_link is None:
            return Sending(self.wire, by_nodes=self.groups.node is not None)
        return self.by_link.sending_of(parameter)

    def differences_of(self, name: str) -> Differences:
        """Return what is kept of the parameters of an FSDP2 module with this name, to add differences to."""
        return self._differences.setdefault(name, Differences())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0) that begins, for the schedule; every rank must set the same."""
        self.epoch = epoch

    def named(self, error: BaseException) -> BaseException:
        """Return torch.distributed's error or, with ``bits="by link"``, an error that names the lost rank."""
        return error if self.by_link is None else self.by_link.lost(error)

    def random(self, step: int, bucket: int, part: int, device: torch.device) -> torch.Generator | None:
        """Return a generator for one (seed, step, bucket, part, rank); None with nearest rounding."""
        if self.options.rounding == "nearest":
            return None
        parts = (self.options.seed, step, bucket, part, self.groups.rank)
        return torch.Generator(device).manual_seed(_mix(parts))

    def signs(self, step: int, bucket: int, part: int, block: int, device: torch.device) -> Tensor:
        """Return the signs of a block's rotation in a step, equal on all ranks."""
        return signs_of(_mix((self.options.seed, step, bucket, part)), block, device)

    def state_dict(self) -> dict[str, Any]:
        """Return the data to resume from: step and epoch; with ``bits="by link"`` also plan, residuals and factors.

        Otherwise residuals are not saved, because they are rebuilt within a step. Where parameters are gathered as
        differences, it has this rank's part of what all ranks keep.
        """
        found: dict[str, Any] = {"step": self.step, "epoch": self.epoch, "options": self.options.text()}
        if self._differences:
            found["differences"] = {name: kept.to_save() for name, kept in self._differences.items()}
        if self.by_link is not None:
            plan = self.by_link.plan
            found["link_plan"] = None if plan is None else plan.to_dict()
            for key, kept in self._kept_by_name():
                found[key] = {self.by_link.name_of(p): value.clone() for p, value in kept.items()}
        return found

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume. Raises `ConfigError` for a state saved under other options, `PlanError` for another model's plan."""
        if saved.get("options") != self.options.text():
            raise ConfigError(
                f"APS state was saved with ({saved.get('options')}), this one has ({self.options.text()}); "
                "build it with the same options"
            )
        self.step = self.first_step = int(saved["step"])
        self.epoch = int(saved["epoch"])
        self.calls.clear()
        self._differences = {name: Differences.resumed(row) for name, row in saved.get("differences", {}).items()}
        for _, kept in self._kept_by_name():
            kept.clear()
        if self.by_link is not None:
            self.by_link.resume(saved.get("link_plan"))
            for key, kept in self._kept_by_name():
                for name, value in saved.get(key, {}).items():
                    parameter = self.by_link.parameter_of(name)
                    kept[parameter] = value.to(parameter.device, copy=True)

    def _kept_by_name(self) -> Iterable[tuple[str, WeakTensorKeyDictionary]]:
        return ("residuals", self.memory.residuals), ("factors", self.memory.factors)


def _mix(parts: Iterable[int]) -> int:
    """Return a 63-bit seed mixed from small integers (splitmix64's steps)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> 1


def _parameters(keep_high: KeepHigh, model: nn.Module | None) -> list[Tensor]:
    found: list[Tensor] = []
    for item in [keep_high] if isinstance(keep_high, str | nn.Module | Tensor) else keep_high:
        if isinstance(item, nn.Module):
            found += item.parameters()
        elif isinstance(item, Tensor):
            found.append(item)
        else:
            found += _matching(item, model)
    return found


def _matching(pattern: str, model: nn.Module | None) -> list[Tensor]:
    if model is None:
        raise ConfigError(f"keep_high={pattern!r} is a name, and names need a model to look in; pass model=")
    named: list[tuple[str, Tensor]] = [(_plain_name(name), p) for name, p in model.named_parameters()]
    found = [p for name, p in named if fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name, f"{pattern}.*")]
    if not found:
        raise ConfigError(f"keep_high={pattern!r} matches no parameter; names here begin with {named[0][0]!r}")
    return found


def _plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of DDP and torch.compile."""
    return name.removeprefix("module.").replace("_orig_mod.", "")
