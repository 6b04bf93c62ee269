"""torch's optim_db, which lists each optimizer's inputs and the mistakes it refuses, against `fxprec.optim`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxprec

pytest.importorskip("expecttest", reason="torch's test suites need it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # their own
    from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

OURS = {"AdamW": fxprec.optim.AdamW, "SGD": fxprec.optim.SGD, "Muon": fxprec.optim.Muon}
INFOS = [info for info in optim_db if info.name in OURS]
# torch cannot have betas that are tensors in each of its implementations; ours read them as numbers.
BORNE = {
    given.optimizer_error_input.desc
    for info in INFOS
    for given in info.optim_error_inputs_func("cpu", torch.float32)
    if "betas" in given.optimizer_error_input.desc
}
IN_OUR_WORDS = {
    "only support 2D parameters",
    "does not support complex parameters",
}  # test_muon.py, test_optim_errors.py


def inputs() -> Iterator[Any]:
    for info in INFOS:
        for given in info.optim_inputs_func("cpu"):
            for implementation in ("plain", *info.supported_impls):
                if implementation != "differentiable":  # refused: below
                    name = f"{info.name}-{given.desc}-{implementation}"
                    yield pytest.param(info.name, given, implementation, id=name)


def mistakes() -> Iterator[Any]:
    for info in INFOS:
        for given in info.optim_error_inputs_func("cpu", torch.float32):
            asked = given.optimizer_error_input
            if asked.desc not in BORNE | IN_OUR_WORDS:
                yield pytest.param(info.name, given, id=f"{info.name}-{asked.desc}-{asked.kwargs}")


def trained(cls: Any, model: nn.Module, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return weights after five steps on random gradients, of which a parameter has none every second step."""
    optimizer = cls(model.parameters(), **kwargs)
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        for i, p in enumerate(model.parameters()):
            p.grad = None if i == 1 and step % 2 else torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("name", "given", "implementation"), list(inputs()))
def test_weights_are_those_of_torchs_optimizer(name: str, given: Any, implementation: str) -> None:
    model = nn.Sequential(*(nn.Linear(a, b, bias=name != "Muon") for a, b in ((17, 33), (33, 5))))
    kwargs = given.kwargs if implementation == "plain" else {**given.kwargs, implementation: True}
    is_odd = implementation != "plain" and isinstance(kwargs.get("lr"), torch.Tensor)
    wanted = trained(getattr(torch.optim, name), copy.deepcopy(model), given.kwargs if is_odd else kwargs)
    for a, b in zip(trained(OURS[name], model, kwargs), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "given"), list(mistakes()))
def test_a_mistake_is_refused_as_torch_refuses_it(name: str, given: Any) -> None:
    asked = given.optimizer_error_input
    assert given.error_on is OptimizerErrorEnum.CONSTRUCTION_ERROR
    params = [nn.Parameter(torch.ones(3))] if asked.params is None else asked.params
    if issubclass(given.error_type, Warning):
        with pytest.warns(given.error_type, match=given.error_regex):
            OURS[name](params, **asked.kwargs)
    else:
        with pytest.raises(given.error_type, match=given.error_regex):
            OURS[name](params, **asked.kwargs)


@pytest.mark.parametrize("betas", [(0.9, torch.tensor(0.99)), (torch.tensor(0.9), torch.tensor(0.99))])
def test_betas_that_are_tensors_are_read_as_numbers(betas: tuple[Any, Any]) -> None:
    model = nn.Linear(17, 33)
    found = trained(fxprec.optim.AdamW, copy.deepcopy(model), {"betas": betas})
    numbers = tuple(float(beta) for beta in betas)
    for a, b in zip(found, trained(fxprec.optim.AdamW, model, {"betas": numbers}), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_derivative_of_the_step_is_refused(name: str) -> None:
    with pytest.raises(
        fxprec.errors.ConfigError, match="differentiable=True is impossible: rounding has no derivative"
    ):
        OURS[name]([nn.Parameter(torch.ones(3))], differentiable=True)
