"""The recommendation: what a tensor without a module leaves to choose."""

from fxprec.diagnosis.advice import advise
from fxprec.diagnosis.rows import Cost, Row
from fxprec.numerics.formats import BF16


def row(site: int, module: str, damage: float) -> Row:
    """A stored tensor of 1,000 elements; in bf16 it does no damage."""

    def cost(fmt: str, damage: float) -> Cost:
        return Cost(format=fmt, damage=damage, progress=0.0, error=damage, overflow=0.0, underflow=0.0, zeros=0.0)

    return Row(
        graph=0, site=site, tensor=f"t{site}", kind="output", module=module, source="", group=0, elements=1000,
        format="e4m3fn", damage=damage, reason="", planned=cost("e4m3fn", damage), may_have_blocks=False,
        costs={"bf16": cost("bf16", 0.0)},
    )  # fmt: skip


def test_a_tensor_without_a_module_stays_low_where_the_others_can_make_up_for_it():
    rows = [row(0, "", 0.09), row(1, "a", 0.08), row(2, "b", 0.07), *(row(i, "c", 0.001) for i in range(3, 8))]
    found = advise(rows, BF16, {"recipe": "fp8"}, tolerance=0.1)
    assert found.options == {"recipe": "fp8", "keep_high": ("a", "b")}
    assert 0.09 < found.predicted < 0.1


def test_where_they_cannot_it_is_named():
    rows = [row(0, "", 0.12), row(1, "a", 0.3), row(2, "b", 0.01)]
    found = advise(rows, BF16, {"recipe": "fp8"}, tolerance=0.1)
    assert found.options == {"recipe": "bf16"}
    assert found.reason.endswith("t0, which does too much of it, belongs to no module that keep_high could name")
