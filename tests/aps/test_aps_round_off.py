"""The shape of the paper's Table 9 on few elements; the kept figure is benchmarks/comm/round_off.py's."""

from __future__ import annotations

from benchmarks.comm.round_off import measure


def test_table_9_is_a_u_over_the_group_size_and_fp32_sums_lie_below_it() -> None:
    found = {name: row["l2_percent"] for name, row in measure(256, 512, 1.0, "1-5-2").items()}
    assert found["4"] > found["8"] > found["16"]
    assert found["32"] < found["64"] < found["256"]
    assert found["fp32 sums"] < min(value for name, value in found.items() if name != "fp32 sums") / 3
