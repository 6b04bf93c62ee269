"""A name for fxprec with options, for tools that take a backend's name and nothing else."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import fxprec
from fxprec.integrations import register_backend
from tests.integrations.small import OPTIONS, Loud, batch

register_backend("fxprec_small", OPTIONS)


def test_the_name_carries_its_options_and_those_given_go_before() -> None:
    model = torch.compile(Loud(), backend="fxprec_small")
    model(batch(0)).sum().backward()
    backend = fxprec.backend_of(model)
    assert backend.config == fxprec.Config(**OPTIONS)
    assert len(backend.plans) == 1
    other = torch.compile(Loud(), backend="fxprec_small", options={"low_ratio": 0.5})
    assert fxprec.backend_of(other).config == fxprec.Config(**{**OPTIONS, "low_ratio": 0.5})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compile_with_the_same_options(copied) -> None:
    twin = copied(torch.compile(Loud(), backend="fxprec_small"))
    assert fxprec.backend_of(twin).config == fxprec.Config(**OPTIONS)


def test_registering_again_is_harmless_and_a_taken_name_is_refused() -> None:
    assert register_backend("fxprec_small", OPTIONS) is register_backend("fxprec_small", dict(OPTIONS))
    for name in ("fxprec_small", "inductor", "fxprec"):
        words = f"backend '{name}' is registered already, for something else; choose another name"
        with pytest.raises(fxprec.ConfigError, match=words):
            register_backend(name, {"recipe": "fp8"})
    with pytest.raises(fxprec.ConfigError, match="recipe"):
        register_backend("fxprec_wrong", {"recipe": "fp9"})
