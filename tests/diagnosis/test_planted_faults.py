"""A share of `python -m benchmarks.doctor faults`: one fault of each kind, the guilty tensor named first."""

import pytest

from benchmarks.doctor import faults
from benchmarks.doctor.__main__ import find
from benchmarks.doctor.networks import NETWORKS

PLAIN = NETWORKS["plain"]


@pytest.fixture(scope="module")
def sites():
    return faults.harmful(PLAIN)


def test_a_layer_scaled_by_1e4(tmp_path):
    found = find(faults.scaled_layer("plain", "second"), tmp_path)
    assert found["rank"] == 1
    assert "overflow" in found["reason"]


def test_a_format_too_narrow(sites, tmp_path):
    found = find(faults.narrow("plain", sites[2]), tmp_path)
    assert (found["rank"], found["named"]) == (1, sites[2].tensor)


def test_a_scale_that_is_never_taken_off(sites, tmp_path):
    found = find(faults.wrong_scale("plain", sites[1]), tmp_path)
    assert (found["rank"], found["named"]) == (1, sites[1].tensor)
    assert found["reason"] == "it is read back 64 times as large: its scale is wrong"


def test_a_swapped_cast(sites, tmp_path):
    found = find(faults.swapped_cast("plain", sites[3]), tmp_path)
    assert (found["rank"], found["named"]) == (1, sites[3].tensor)
    assert found["reason"] == "stored as e5m2 and read back as e4m3fn: its codes mean other numbers"


def test_a_saturating_softmax(tmp_path):
    found = find(faults.hot_softmax("language", "layers.0.attention.qkv", "layers.0.attention"), tmp_path)
    assert found["rank"] == 1
    assert "backward exponentiates it" in found["reason"]
