"""`torch.set_default_dtype` changes what models are made of, and nothing of ours: the same bits under each."""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from op_by_op import run_op_by_op
from optim.rules import RULES, numbers_of, row_of
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import fxprec
import fxprec.driver.compilation
from fxprec import arith, optim
from fxprec.ir.symbolic import CARRIED, MEASURE, TABLE_COLUMNS
from fxprec.numerics.formats import parse
from fxprec.runtime.aps import codecs
from fxprec.runtime.aps.codec_tables import TABLES
from fxprec.runtime.aps.coder import Coder
from fxprec.runtime.aps.exponents import exponent_codes, factor_exponents, mask_factors
from fxprec.runtime.aps.segments import largest_magnitudes
from fxprec.runtime.aps.wire import wire_of
from fxprec.runtime.optim import cpp, reference
from fxprec.runtime.scaling import histogram

ROOT = Path(__file__).parents[1]
DTYPES = (torch.bfloat16, torch.float16, torch.float64)
# Where left out, the dtype (and the memory behind it) is the user's default.
FACTORIES = {"empty", "zeros", "ones", "full", "rand", "randn", "linspace", "eye", "tensor", "scalar_tensor"}
IN_USERS_DTYPE = {"fxprec/demo/models.py", "fxprec/demo/tasks.py"}  # models and their data

ALONE = "fxprec/gpu_check/"  # its processes are its own: nobody sets a default there


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within it, ``dtype`` is the default, and nothing computed before is kept."""
    before = torch.get_default_dtype()
    _forget()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        _forget()


def _forget() -> None:
    torch.compiler.reset()
    ours = [vars(module) for name, module in sys.modules.items() if name.startswith("fxprec")]
    for cached in [value for names in ours for value in names.values() if hasattr(value, "cache_clear")]:
        cached.cache_clear()


def bits(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[x.itemsize]
    return str(x.dtype), x.detach().contiguous().view(integer).flatten().tolist()


def test_no_tensor_is_made_in_the_default_dtype() -> None:
    found = []
    for folder in ("fxprec", "passes", "runtime"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name not in IN_USERS_DTYPE and not name.startswith(ALONE):
                found += [f"{name}:{line}" for line in _without_dtype(ast.parse(path.read_text(encoding="utf-8")))]
    assert not found


def _without_dtype(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            owner = node.func.value
            keywords = {keyword.arg for keyword in node.keywords}
            if isinstance(owner, ast.Name) and owner.id == "torch" and "dtype" not in keywords:
                yield node.lineno


def values(count: int = 600) -> Tensor:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count, generator=g, dtype=torch.float32)
    x *= 2.0 ** torch.randint(-40, 20, (count,), generator=g).to(torch.float32)
    x[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45], dtype=torch.float32)
    return x


def rounded() -> Any:
    names = ("bf16", "e4m3fn", "1-6-9", "1-4-3+4", "1-8-18")
    x, made = values(), []
    for name in names:
        seeded = torch.Generator().manual_seed(1)
        codes = fxprec.encode(x, name)
        made += [codes, fxprec.decode(codes, name), fxprec.quantize(x, name), fxprec.quantize(x, name, "zero")]
        made.append(fxprec.quantize(x, name, "stochastic", seeded))
    return made


def coded_by_tables() -> Any:
    x = values().nan_to_num(0)
    return [codecs.encode(x, codecs.codec(name)) for name in TABLES]


def multiplied() -> Any:
    x = values(48).nan_to_num(0, 1, 1).clamp(-8, 8)
    a, b = x.view(6, 8), x.view(8, 6)
    return [
        [arith.matmul(a, b, "1-4-3", acc, kahan=True, method=method), arith.sum(x, "1-5-2", acc, method=method)]
        for acc in ("1-6-9", "fp32")
        for method in ("auto", "reference")
    ]


def table_of(name: str) -> Tensor:
    """A table of one row that scales by 4, carries 2 and measures."""
    table = torch.zeros(1, TABLE_COLUMNS, dtype=torch.int32)
    table[0, :CARRIED] = torch.tensor(fxprec.numerics.rows.format_row(parse(name)), dtype=torch.int32)
    table[0, 0], table[0, CARRIED], table[0, MEASURE] = 2, 1, 1
    return table


def stored() -> Any:
    ops, x, made = torch.ops.fxprec, values(), []
    for name, storage in (("1-4-3", "packed"), ("e5m2", "native"), ("1-6-9", "packed")):
        table = table_of(name)
        made.append(ops.store(x, table, 0, name, storage, True, True))
        made += [ops.load(made[-1][0], table, 0, name), ops.round(x, table, 0, name, storage, False)]
        made.append(ops.quantize(x, table, 0, name, storage))
        made += [ops.counts(x.nan_to_num(0, 1, 1), table, 0, name), ops.histogram(x, table, 0, name)]
        table[0, MEASURE] = 0
        made += [ops.histogram(x, table, 0, name), histogram.count_exponents(x[:0], parse(name))]
    return made


def exchanged() -> Any:
    made = []
    for kind in ("1-5-2", "e4m3fn", "dynamic-tree"):
        for random in (None, torch.Generator().manual_seed(0)):
            x = values().nan_to_num(0, 1, 1)
            bounds = [(0, 400), (400, 600), (600, 600)]
            coder = Coder(wire_of(kind), random, bounded=True)
            codes = exponent_codes(largest_magnitudes(x, bounds), 2)
            exponents, mask = factor_exponents(codes, coder.wire.top), mask_factors(codes)
            sent = coder.scale_and_encode(x.clone(), bounds, exponents)
            made += [codes, sent, coder.decode_scaled(sent, bounds, -exponents, mask, 2)]
            made += [coder.sum(torch.stack([sent, sent])), coder.round(x), largest_magnitudes(x, [])]
    return made


def stepped() -> Any:
    made = []
    for rule in (RULES[0], RULES[5]):
        with helpers_in_float32():
            rows = [row_of(rule, 50, seed) for seed in range(2)]
            numbers = numbers_of(rule, 2)
        counts = torch.zeros(2, 2, dtype=torch.int64)
        again = [t.clone() for t in rows[0]]
        assert cpp.run(rule, rows, *numbers, counts)
        reference.run(rule, again, numbers[0][0], numbers[1][0], torch.zeros(2, dtype=torch.int64))
        made += [cpp.source(rule), rows, counts, again]
    return made


@contextmanager
def helpers_in_float32() -> Iterator[None]:
    """What other tests' helpers make is float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def trained_by_our_optimizers() -> Any:
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        for algorithm, options in ((optim.SGD, {"momentum": 0.9}), (optim.AdamW, {"betas": (0.9, 0.99)})):
            for update in ("nearest", "stochastic+kahan"):
                weight = nn.Parameter(values(64).nan_to_num(0, 1, 1).clamp(-1, 1).to(dtype))
                made_by = algorithm([weight], lr=0.1, update=update, count_cancelled=True, **options)
                for _ in range(2):
                    weight.grad = torch.linspace(-1, 1, 64, dtype=torch.float32).to(dtype)
                    made_by.step()
                made += [weight, made_by.cancelled()]
    return made


@pytest.mark.parametrize(
    "compute", [rounded, coded_by_tables, multiplied, stored, exchanged, stepped, trained_by_our_optimizers]
)
def test_the_same_bits_under_every_default_dtype(compute: Callable[[], Any]) -> None:
    with default_dtype(torch.float32):
        wanted = tree_map(bits, compute())
    for dtype in DTYPES:
        with default_dtype(dtype):
            assert tree_map(bits, compute()) == wanted, dtype


CASES = [
    ("bf16", "native"), ("fp16", "native"), ("fp8", "native"), ("fp8", "packed"),
    ("fp8", "simulate"), ("hfp8", "packed"), ("hfp8", "simulate"),
]  # fmt: skip

EAGER = (("bf16", "native"), ("fp8", "native"), ("hfp8", "packed"), ("fp8", "simulate"))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).float()


def train(model: nn.Module, x: Tensor, recipe: str, storage: str, lowering: str) -> Any:
    scaling = fxprec.GradScaling(interval=1, estimate="histogram")
    options = {"recipe": recipe, "storage": storage, "lowering": lowering, "grad_scaling": scaling}
    backend = fxprec.Backend(fxprec.Config(**options))
    compiled, made = torch.compile(model, backend=backend), []
    for _ in range(2):
        out = compiled(x)
        out.float().square().mean().backward()
        made.append([out, *(p.grad for p in model.parameters())])
        model.zero_grad()
    return made, backend.stats()


@pytest.mark.parametrize(
    ("recipe", "storage", "lowering"),
    [
        *((*case, "auto") for case in CASES),
        *(pytest.param(*case, "eager", marks=() if case in EAGER else pytest.mark.full) for case in CASES),
    ],
)
def test_training_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, recipe: str, storage: str, lowering: str) -> None:
    """Without code generation, which promises no bits: kernels are called, the rest runs op by op."""
    monkeypatch.setattr(fxprec.driver.compilation.compat, "compile_fx_inner", run_op_by_op())
    model, x = network(), values(48).clamp(-4, 4).nan_to_num(0).view(6, 8)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        with default_dtype(dtype):
            steps, stats = train(copy.deepcopy(model), x, recipe, storage, lowering)
            found.append((tree_map(bits, steps), stats))
    assert found[0] == found[1]
