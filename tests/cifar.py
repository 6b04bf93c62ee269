"""The four CIFAR networks of the paper: planned under fake tensors, and counted a second way."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from helpers import compiled, eager_backend, recorded_works
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # examples/ is not installed

from examples.models import resnet
from examples.models.mobilenet import mobilenet_v2
from examples.models.resnet import resnet18
from examples.models.shufflenet import shufflenet_v2
from examples.models.squeezenet import squeezenet
from fxprec.passes.analysis.groups import Grouped, group_tensors
from fxprec.passes.analysis.tensors import CountedTensor
from fxprec.passes.base import Work
from fxprec.passes.group_tensors import GroupTensors
from fxprec.plan import Plan

# docs/algorithms.md, "Operators, tensors, groups".
GEMMS = {squeezenet: 26, shufflenet_v2: 57, mobilenet_v2: 58, resnet18: 21}
BATCH = 128


def short_resnet(num_classes: int = 100, width: float = 1.0) -> nn.Module:
    """Return ResNet-18's stem, first two stages and classifier: the later stages repeat the second."""
    with mock.patch.object(resnet, "STAGES", resnet.STAGES[:2]):
        return resnet18(num_classes, width)


@dataclass(frozen=True)
class Planned:
    plan: Plan
    tensors: Sequence[CountedTensor]
    regions: Grouped
    """The same operators grouped by data flow."""


def plan(make: Callable[[], nn.Module], *, dynamic: bool = False) -> Planned:
    """Plan one training step at batch 128 without allocating or computing anything."""
    backend = eager_backend("hfp8", low_ratio=0.5)
    by_flow: list[Grouped] = []
    apply = GroupTensors.apply

    def group_both_ways(self: GroupTensors, work: Work) -> None:
        by_flow.append(group_tensors(work.operators, "dataflow", copies_parameters=work.settings.is_simulated))
        apply(self, work)

    grouping = mock.patch.object(GroupTensors, "apply", group_both_ways)
    with recorded_works() as works, grouping, FakeTensorMode(allow_non_fake_inputs=True):
        model, images = make(), torch.empty(BATCH, 3, 32, 32)
        if dynamic:
            torch._dynamo.mark_dynamic(images, 0)
        compiled(model, backend)(images)
    return Planned(backend.plans[0], works[0].grouped.tensors, by_flow[0])


VIEWS = {"flatten", "view", "transpose", "reshape", "chunk", "size", "dim", "__get__"}
CALLS_A_GEMM = {"conv2d", "linear"}


class Count(TorchFunctionMode):
    """Counts elements by group and kind from the torch functions a model calls; each tensor remembers its group."""

    def __init__(self, images: torch.Tensor) -> None:
        super().__init__()
        self.group = 0
        self.counts: dict[int, Counter[str]] = defaultdict(Counter)
        self.counts[0]["output"] += images.numel()
        self.group_of = {id(images): 0}
        self.keep: list[object] = [images]  # ids must not be used again

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", str(function))
        result = function(*args, **(kwargs or {}))
        flat = [t for a in args for t in (a if isinstance(a, list | tuple) else [a]) if isinstance(t, torch.Tensor)]
        several = result if isinstance(result, tuple | list) else [result]
        results = [r for r in several if isinstance(r, torch.Tensor) and r.is_floating_point()]
        self.keep += results
        if name in VIEWS:
            self.group_of.update({id(r): self.group_of.get(id(flat[0]), -1) for r in results})
            return result
        if name in CALLS_A_GEMM:
            self.group += 1
        tensors = [*flat, *(v for v in (kwargs or {}).values() if isinstance(v, torch.Tensor))]
        for parameter in {id(t): t for t in tensors if isinstance(t, nn.Parameter)}.values():
            if id(parameter) not in self.group_of:
                group = self.group_of[id(parameter)] = self.group_of[id(flat[0])]
                self.counts[group].update(param=parameter.numel(), grad_param=parameter.numel())
        for r in results:
            self.group_of[id(r)] = self.group
            self.counts[self.group].update(output=r.numel(), grad_output=r.numel())
        return result


@cache
def count(make: Callable[[], nn.Module]) -> dict[int, Counter[str]]:
    """Count on the meta device, by hand of the functions called."""
    with torch.device("meta"):
        model, images = make(), torch.empty(BATCH, 3, 32, 32)
    with Count(images) as counting:
        model(images)
    return counting.counts
