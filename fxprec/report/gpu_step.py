"""Estimate a plan's training step on a GPU, seconds and peak bytes, beside bfloat16 autocast.

The model is rough: it estimates before any training whether low precision is worth it. GEMMs run at the rates of
`fxprec.passes.analysis.gemm_costs`. Everything else runs at memory speed, with one read and one write of each tensor
that a GEMM reads or writes. `python -m benchmarks.gpu.roofline` counts the code that Inductor really generates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fxprec.numerics.formats import parse
from fxprec.passes.analysis.gemm_costs import Costs, Gpu, Product, costs_of
from fxprec.passes.weigh_gemms import weigh
from fxprec.plan import Gemm, Plan, Site

_HIGH, _WIDE = 2, 4  # bytes of bfloat16, and of a parameter and its gradient
_FP8_SIZES = 16  # the sizes of a native GEMM are multiples of it


@dataclass(frozen=True)
class Layer:
    """A GEMM with a weight, (rows, inner) times (inner, columns), with its backward; or attention."""

    module: str
    rows: int
    columns: int
    inner: int
    groups: tuple[int, int]
    """The groups before and after the GEMM."""
    flops: float = 0.0
    """Operations of attention's forward pass over the causal half; 0 for a GEMM."""

    @property
    def weight(self) -> int:
        """Return the elements of the weight."""
        return 0 if self.flops else self.inner * self.columns

    def high_seconds(self, costs: Costs) -> float:
        """Return the seconds of all GEMMs of the layer in bfloat16."""
        if self.flops:
            return 3.5 * self.flops / costs.bf16_flop_per_s + 2 * costs.launch_s
        return sum(costs.product(*sizes, costs.bf16_flop_per_s, _HIGH) + costs.launch_s for sizes in self._sizes())

    def low_seconds(self, costs: Costs, *, backward: bool) -> float:
        """Return the seconds of a layer where codes pay, multiplied in forward and, if ``backward``, in backward."""
        assert costs.fp8_flop_per_s is not None, "codes pay"
        rates = [costs.fp8_flop_per_s, *[costs.fp8_flop_per_s if backward else costs.bf16_flop_per_s] * 2]
        operand = (1.0, *[1.0 if backward else float(_HIGH)] * 2)
        sizes = zip(self._sizes(), rates, operand, strict=True)
        return sum(costs.product(*mnk, rate, size) + costs.launch_s for mnk, rate, size in sizes)

    def pays(self, costs: Costs) -> bool:
        """Return whether multiplying codes pays, including the transposed copies."""
        if self.flops or costs.fp8_flop_per_s is None or self.inner % _FP8_SIZES or self.columns % _FP8_SIZES:
            return False
        x, dy = self.rows * self.inner, self.rows * self.columns
        copies: tuple[tuple[int, ...], ...] = ((), (self.weight,), (x, dy))
        decodes: tuple[tuple[int, ...], ...] = ((), (self.weight,), (x,))
        written = (x + self.weight, dy, 0)
        parts = zip(self._sizes(), copies, decodes, written, strict=True)
        return bool(weigh([Product(*mnk, "native", c, d, w) for mnk, c, d, w in parts], costs).pays)

    def _sizes(self) -> tuple[tuple[int, int, int], ...]:
        m, n, k = self.rows, self.columns, self.inner
        return (m, n, k), (m, k, n), (n, k, m)


@dataclass(frozen=True)
class Step:
    """A predicted step."""

    name: str
    seconds: float
    peak_bytes: float
    """Activations and temporaries, without parameters and their gradients."""
    low: tuple[str, ...] = ()
    """Modules whose GEMMs multiply codes."""


@dataclass(frozen=True)
class Prediction:
    """Steps of one plan on one GPU, autocast first. ``layers`` has pairs: a layer, and whether codes pay in it."""

    gpu: str
    source: str
    layers: tuple[tuple[Layer, bool], ...]
    steps: tuple[Step, ...]
    left_out: int
    """Number of GEMMs that the plan does not describe well enough: products of activations."""


def predict(plan: Plan, gpu: Gpu) -> Prediction:
    """Predict a step of the plan, and of a plan with half of the elements low. Sizes are those of the trace."""
    costs, layers = costs_of(gpu), list(layers_of(plan))
    paying = {layer for layer in layers if layer.pays(costs)}
    step = _Model(plan, costs, layers, paying)
    half = step.with_low("low_ratio=0.5", _low_at(plan, 0.5))
    steps = (step.autocast(), step.with_low("this plan", plan.low_groups), half)
    known = tuple((layer, layer in paying) for layer in layers)
    return Prediction(gpu.name, costs.source, known, steps, len(plan.gemms) - len(layers))


def layers_of(plan: Plan) -> Iterator[Layer]:
    """Yield the plan's GEMMs whose sizes are known from its sites."""
    outputs = {site.tensor: site for site in plan.sites if site.kind == "output"}
    weights = {site.module: site for site in plan.sites if site.kind == "param" and " x " in site.shape}
    for gemm in plan.gemms:
        out, groups = outputs.get(gemm.node), (gemm.group_before, gemm.group_after)
        if out is None:
            continue
        if "scaled_dot_product" in gemm.op:
            *_, tokens, size = _sizes(out)
            yield Layer(gemm.module or gemm.node, 0, 0, 0, groups, 2.0 * out.elements // size * tokens * size)
        elif gemm.module in weights:
            yield _layer(gemm, out, _sizes(weights[gemm.module]), groups)


def _layer(gemm: Gemm, out: Site, weight: Sequence[int], groups: tuple[int, int]) -> Layer:
    last = _sizes(out)[-1]
    columns = last if "mm" in gemm.op and last in weight else weight[0]
    return Layer(gemm.module, out.elements // columns, columns, prod(weight) // columns, groups)


def _sizes(site: Site) -> list[int]:
    """Return a shape's sizes; a dynamic size is the number of elements divided by the other sizes."""
    words = site.shape.split(" x ")
    known = [int(word) for word in words if word.isdecimal()]
    rest = site.elements // max(prod(known), 1)
    return [int(word) if word.isdecimal() else rest for word in words]


def _low_at(plan: Plan, ratio: float) -> set[int]:
    """Return the groups that the plan's policy makes low first, up to this share of all elements."""
    low, total = set(), 0
    for group in sorted(plan.groups, key=lambda g: g.order):
        if total >= ratio * plan.total_elements:
            break
        low.add(group.id)
        total += group.elements
    return low


@dataclass(frozen=True)
class _Model:
    plan: Plan
    costs: Costs
    layers: Sequence[Layer]
    paying: Collection[Layer]

    def autocast(self) -> Step:
        seconds = sum(layer.high_seconds(self.costs) for layer in self.layers)
        weights = sum(layer.weight for layer in self.layers)
        moved = self._activation_bytes() + weights * 2 * (_WIDE + _HIGH)
        saved = sum(site.elements * _HIGH for site in self._saved()) + weights * _HIGH
        return Step("bf16 autocast", seconds + moved / self.costs.bytes_per_s, saved + self._temporary())

    def with_low(self, name: str, low: Collection[int]) -> Step:
        """Predict the step in which these groups are low."""
        seconds, moved, names = 0.0, float(self._activation_bytes()), []
        for layer in self.layers:
            before, after = (group in low for group in layer.groups)
            if layer in self.paying and before:
                seconds += layer.low_seconds(self.costs, backward=after)
                x, dy = layer.rows * layer.inner, layer.rows * layer.columns
                moved += layer.weight * 2 * (_WIDE + 1) + 2 * x + (2 * dy if after else 0)
                names.append(layer.module)
            else:
                seconds += layer.high_seconds(self.costs)
                moved += layer.weight * 2 * (_WIDE + _HIGH)
        saved = sum(site.elements * self._stored_bytes(site, low) for site in self._saved())
        return Step(name, seconds + moved / self.costs.bytes_per_s, saved + self._temporary(), tuple(names))

    def _stored_bytes(self, site: Site, low: Collection[int]) -> float:
        recipe = self.plan.recipe
        was_low = self.plan.groups[site.group].low
        fmt = parse(site.format)
        if was_low and site.group not in low:
            fmt = recipe.hi
        elif not was_low and site.group in low and not site.why:
            fmt = recipe.lo_forward
        return fmt.bits / 8

    def _saved(self) -> Iterator[Site]:
        """Yield the activations that backward reads."""
        for site in self.plan.sites:
            if site.kind == "output" and site.reads != "all":
                yield site

    def _activation_bytes(self) -> int:
        """Return the bytes of values and gradients between GEMMs, each written or read once per half outside them."""
        made_by_gemms = {gemm.node for gemm in self.plan.gemms}
        saved = {site.id for site in self._saved()}
        sites = [site for site in self.plan.sites if site.kind == "output"]
        return sum(
            site.elements * _HIGH * (2 + (site.id in saved))
            for site in sites
            if site.tensor in made_by_gemms or site.id in saved
        )

    def _temporary(self) -> int:
        """Return the bytes of backward's widest gradient and its GEMM's result."""
        return max((layer.rows * (layer.columns + layer.inner) * _HIGH for layer in self.layers), default=0)


def to_dict(found: Prediction) -> Mapping[str, object]:
    """Return plain data."""
    base = found.steps[0]
    steps = [
        {
            "name": step.name,
            "seconds": step.seconds,
            "against_autocast": step.seconds / base.seconds if base.seconds else None,
            "peak_bytes": int(step.peak_bytes),
            "over_codes": list(step.low),
        }
        for step in found.steps
    ]
    gemms = [
        {"module": layer.module, "rows": layer.rows, "columns": layer.columns, "inner": layer.inner, "pays": pays}
        for layer, pays in found.layers
    ]
    return {"gpu": found.gpu, "source": found.source, "steps": steps, "gemms": gemms, "left_out": found.left_out}
