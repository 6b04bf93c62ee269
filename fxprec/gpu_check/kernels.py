"""Item 4: generated, block, optimizer, arithmetic and APS kernels, bit for bit against the CPU's reference."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import torch
from torch import Tensor

import fxprec
from fxprec.gpu_check import generated
from fxprec.gpu_check.ground import Ground, require, same
from fxprec.gpu_check.samples import hard_numbers, transformer
from fxprec.numerics import ahead
from fxprec.numerics.formats import parse
from fxprec.runtime.aps import codecs
from fxprec.runtime.arith import reference as arithmetic
from fxprec.runtime.arith.spec import Spec
from fxprec.runtime.optim import reference as steps
from fxprec.runtime.optim.rule import Rule

RULES = (
    Rule("sgd", "stochastic", parse("bf16"), torch.bfloat16, momentum=True, nesterov=True, statistics=True),
    Rule("adamw", "stochastic+kahan", parse("bf16"), torch.bfloat16, weight_decay=True, statistics=True),
    Rule("adamw", "nearest", parse("fp32"), torch.float32, amsgrad=True),
)
SPECS = (
    Spec(parse("1-4-3"), parse("1-5-2"), kahan=True),
    Spec(parse("bf16"), parse("1-8-9"), chunk=16),
    Spec(parse("fp32"), parse("fp32")),
)


def check(ground: Ground) -> None:
    """Run each kind of kernel on the device, and its reference on the CPU."""
    with np.errstate(all="ignore"):  # the interpreter uses NumPy, which warns of inf and NaN
        for name, function, inputs in generated.regions():
            with ground.case(f"generated kernel, {name}"):
                generated.check_region(ground, function, inputs)
        for name in generated.BLOCKS:
            with ground.case(f"blocks of {name}"):
                generated.check_blocks(ground, name)
        for rule in RULES:
            with ground.case(f"optimizer {rule.algorithm} {rule.update}"):
                _optimizer(ground, rule)
        for spec in SPECS:
            with ground.case(f"arithmetic {spec.fmt.name} in {spec.accumulate.name}"):
                _arithmetic(ground, spec)
        with ground.case("APS codecs"):
            _codecs(ground)
        with ground.case("APS magnitudes and scalings of layers"):
            _layers(ground)
    if ground.needs_gpu("whole steps with verify=True, fxprec.optim, fxprec.quantize above 2^20 elements"):
        with ground.case("a step in generated kernels, each verified"):
            _verified(ground)
        with ground.case("fxprec.optim.AdamW as on a CPU"):
            _public_optimizer(ground)
        with ground.case("fxprec.quantize, encode and decode of 2^21 elements"):
            _rounding(ground)


def compile_ahead(ground: Ground) -> None:
    """Compile the kernels of the optimizer, the arithmetic and the codecs for each architecture."""
    from fxprec.runtime.aps import codec_triton, segments_triton
    from fxprec.runtime.arith import triton_kernel
    from fxprec.runtime.optim import triton_source

    for arch in ahead.ARCHITECTURES:
        with ground.case(f"sm_{arch}"):
            for is_aligned in (True, False):
                triton_source.compiled(RULES[1], arch, is_aligned=is_aligned)
            triton_kernel.compile_to_ptx(SPECS[0], arch)
            codec_triton.compile_to_ptx(arch)
            segments_triton.compile_to_ptx(arch)


def _optimizer(ground: Ground, rule: Rule) -> None:
    from fxprec.runtime.optim import triton_step

    sizes = (300_000, 300_001, 7, 0, 5) if ground.on_gpu else (2_112, 2_100, 7, 0, 5)
    rows = [[_state(ground, name, n).to(rule.carrier) for name in rule.tensors] for n in sizes]
    scalars = torch.rand(len(rows), len(rule.scalars)) * 0.1 + 0.01
    integers = torch.randint(-(2**31), 2**31 - 1, (len(rows), 3), dtype=torch.int32)
    here = [[t.to(ground.device, copy=True) for t in row] for row in rows]
    counts = torch.zeros(len(rows), 2, dtype=torch.int64, device=ground.device)
    triton_step.run(rule, here, scalars, integers, counts if rule.statistics else None)
    for k, (row, found) in enumerate(zip(rows, here, strict=True)):
        count = torch.zeros(2, dtype=torch.int64)
        steps.run(rule, row, scalars[k], integers[k], count if rule.statistics else None)
        for name, mine, theirs in zip(rule.tensors, found, row, strict=True):
            same(f"{name} of {sizes[k]}", mine, theirs)
        same(f"counts of {sizes[k]}", counts[k], count)


def _state(ground: Ground, name: str, n: int) -> Tensor:
    x = hard_numbers(n, seed=int(torch.randint(1 << 20, ())))
    if not ground.on_gpu:  # the interpreter flushes bfloat16's subnormal numbers to zero
        x = torch.where(x.abs() < 2.0**-50, torch.zeros_like(x), x)
    return x.abs() if "sq" in name else x


def _arithmetic(ground: Ground, spec: Spec) -> None:
    from fxprec.runtime.arith import triton_kernel

    a, b = (fxprec.quantize(torch.randn(shape), spec.fmt) for shape in ((37, 24), (24, 45)))
    found = triton_kernel.matmul(a.to(ground.device), b.to(ground.device), spec)
    same("sums", found, arithmetic.matmul(a, b, spec))


def _codecs(ground: Ground) -> None:
    from fxprec.runtime.aps import codec_triton

    x = torch.cat([torch.rand(5000) * 2 - 1, hard_numbers(64)])
    for name in ("dynamic-tree", "linear", "static-tree"):
        codec = codecs.codec(name)
        found, wanted = codec_triton.encode_values(x.to(ground.device), codec), codecs.encode_values(x, codec)
        same(f"codes, {name}", found, wanted)
        same(f"values, {name}", codecs.decode_values(found, codec), codecs.decode_values(wanted, codec))


def _layers(ground: Ground) -> None:
    from fxprec.runtime.aps import segments, segments_triton
    from fxprec.runtime.aps.layout import bounds_of

    sizes = (5, 0, 3000, 1, 1024, 700)
    bounds, flat = bounds_of(sizes), hard_numbers(sum(sizes))
    powers = torch.tensor([200, 3, -7, 0, -215, 126], dtype=torch.int32)
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0, torch.nan, 1.0])
    here = flat.to(ground.device, copy=True)
    found = segments_triton.largest_magnitudes(here, bounds)
    same("magnitudes", found, segments.largest_magnitudes(flat, bounds))
    segments_triton.scale_by_powers(here, bounds, powers.to(ground.device), mask.to(ground.device))
    segments.scale_by_powers(flat, bounds, powers, mask)
    same("scaled layers", here, flat)


def _verified(ground: Ground) -> None:
    model = transformer(ground.device, width=128, heads=2, layers=1)
    options = fxprec.Config(recipe="fp8", low_ratio=1.0, lowering="triton", verify=True)
    compiled = torch.compile(model, backend=(backend := fxprec.Backend(options)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(torch.randn(2, 64, 128, device=ground.device)).square().mean().backward()
    faults = [f"{e.site}: {e.detail}" for e in backend.events if e.kind == "fallback"]
    require(not faults, "; ".join(faults))


def _public_optimizer(ground: Ground) -> None:
    """Compare three steps of one optimizer on the GPU and on the CPU: weights and state must be equal."""
    models = [torch.nn.Linear(300, 200).bfloat16()]
    models.append(copy.deepcopy(models[0]).to(ground.device))
    optimizers = [fxprec.optim.AdamW(m.parameters(), lr=1e-2, betas=(0.9, 0.99), update="kahan") for m in models]
    for _ in range(3):
        for weights in zip(*(m.parameters() for m in models), strict=True):
            gradient = torch.randn(weights[0].shape).bfloat16()
            for p in weights:
                p.grad = gradient.to(p.device)
        for optimizer in optimizers:
            optimizer.step()
    for (name, mine), theirs in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        same(name, mine, theirs)
        for key, value in optimizers[0].state[theirs].items():
            same(f"{key} of {name}", optimizers[1].state[mine][key], value)


def _rounding(ground: Ground) -> None:
    """Compare Inductor's kernel, used above 2^20 elements, with the CPU, op by op on parts below that size."""
    x = hard_numbers(1 << 11, 1 << 10)
    for name in ("e4m3fn", "1-5-2"):
        codes = fxprec.encode(x.to(ground.device), name)
        wanted = torch.cat([fxprec.encode(part, name) for part in x.split(1 << 9)])
        same(f"codes of {name}", codes, wanted)
        numbers = torch.cat([fxprec.decode(part, name) for part in wanted.split(1 << 9)])
        same(f"numbers of {name}", fxprec.decode(codes, name), numbers)
        rounded = torch.cat([fxprec.quantize(part, name) for part in x.split(1 << 9)])
        same(f"rounded to {name}", fxprec.quantize(x.to(ground.device), name), rounded)
