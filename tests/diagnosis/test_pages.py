"""The pages of `compare` and `doctor` in headless Chromium, with 5,000 tensors: usable in 2 s, by keyboard, in the dark."""

from __future__ import annotations

import math
import time

import pytest

pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install selenium)")
from selenium.webdriver.common.keys import Keys

from fxprec.diagnosis.advice import Advice
from fxprec.diagnosis.diagnosis import Diagnosis
from fxprec.diagnosis.page import page as diagnosis_page
from fxprec.diagnosis.rows import Check, Cost, GroupRow, Row
from fxprec.report.compare_page import page as compare_page
from fxprec.report.html import report_html
from fxprec.report.runs import Track
from fxprec.report.streams import Comparison, Pair, Parting
from tests.browser import chromium, needs_chromium
from tests.report_pages import made_up

pytestmark = needs_chromium
SITES, USABLE = 5000, 2.0  # seconds; a shared machine
HOSTILE = "<img src=x onerror=alert(1)>"
BACKGROUND = "return getComputedStyle(document.body).backgroundColor"
ROWS = "return document.querySelectorAll('#{} tbody tr').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


def track(i: int, steps: range) -> Track:
    half = "grad_output" if i % 2 else "output"
    points = {step: (1.0 + i / SITES + step, 0.0, 0.0) for step in steps}
    return Track("graph-0", f"t{i}{HOSTILE}", half, f"layers.{i // 50}", f"m.py:{i}", "e4m3fn", (i, 0), True, points)


def comparison(tensors: int) -> Comparison:
    """Every third tensor parts, at step 3 and later."""
    steps, pairs = range(1, 41), []
    for i in range(tensors):
        first = None if i % 3 else Parting(3 + i % 7, "amax", 1.0, 2.0, 1.0)
        apart = tuple(0.0 if first is None or step < first.step else 1.0 for step in steps)
        pairs.append(Pair(track(i, steps), track(i, steps), tuple(steps), first, apart))
    ordered = tuple(sorted(pairs, key=lambda pair: pair.order))
    return Comparison(
        "runs/a", HOSTILE, False, 0.1, ordered, tuple(steps), (), ("only: here",), ("recipe: fp8 and bf16",)
    )


def diagnosis(tensors: int) -> Diagnosis:
    formats = ("e4m3fn", "e5m2", "bf16")

    def cost(fmt: str, damage: float) -> Cost:
        return Cost(format=fmt, damage=damage, progress=-damage, error=damage, overflow=0.0, underflow=0.0, zeros=0.0)

    rows = [
        Row(
            graph=0, site=i, tensor=f"t{i}", kind="output", module=f"layers.{i // 5}{HOSTILE}", source=f"m.py:{i}",
            group=i // 50, elements=100, format="e4m3fn", damage=1.0 / (i + 1), bias=0.0, reason="rounding",
            planned=cost("e4m3fn", 1.0 / (i + 1)), may_have_blocks=False,
            costs={f: cost(f, 1.0 / (i + 1 + j)) for j, f in enumerate(formats)},
        )
        for i in range(tensors)
    ]  # fmt: skip
    groups = [
        GroupRow(graph=0, group=g, modules=(f"layers.{g}",), tensors=50, elements=5000, damage=1.0 / (g + 1), damages=dict.fromkeys(formats, 0.1))
        for g in range(tensors // 50)
    ]  # fmt: skip
    check = Check(name="group 0", predicted=0.1, measured=0.1, predicted_progress=-0.1, measured_progress=-0.1)
    advice = Advice(
        options={"recipe": "fp8"}, reason="as planned", predicted=0.1, bytes_all_high=4, bytes_as_planned=1, bytes_recommended=1, stored={}
    )  # fmt: skip
    return Diagnosis(
        model="Net", loss=math.nan, formats=formats, ranking=tuple(rows), gemms=(),
        groups=tuple(groups), checks=(check,), whole=(check,),
        spearman=0.9, advice=advice, notes=(), seconds=1.0,
    )  # fmt: skip


def loaded(browser, path, text: str) -> float:
    """Load a page; return the seconds until it has drawn itself and answers."""
    start = time.monotonic()
    browser.load(path, text)
    browser.settle()
    return time.monotonic() - start


def best_of_three(browser, path, text: str) -> float:
    return min(loaded(browser, path, text) for _ in range(3))


def test_two_runs_of_5000_tensors(browser, tmp_path):
    assert best_of_three(browser, tmp_path / "compare.html", compare_page(comparison(SITES))) < USABLE
    assert "They first differ at step 3, in forward: t0<img" in browser.shown("#said")
    assert browser(ROWS.format("tensor-table")) == 200
    browser.find("body").send_keys("/")
    browser.keys("grad_output layers.7 ")
    assert "of 5,000 tensors" in browser.shown("#found")
    assert browser("return document.querySelectorAll('#tensor-table .link')[0].textContent").startswith("t")
    browser.keys(Keys.ESCAPE)
    browser("document.querySelector('#tensor-table tbody tr:nth-child(2) button').focus()")
    browser.keys(Keys.ENTER)
    assert "differs from step 3 on by amax, 1 and 2" in browser.shown("#shown")
    assert browser("return document.querySelectorAll('#shown figure').length") == 2
    assert browser("return document.images.length") == 0
    assert browser(BACKGROUND) != browser.in_the_dark(BACKGROUND) == "rgb(20, 23, 27)"
    for width in (360, 1280):
        with browser.width(width):
            assert browser("return document.documentElement.scrollWidth") <= width


def test_runs_that_do_not_part_say_so(browser, tmp_path):
    alike = comparison(2)
    loaded(browser, tmp_path / "compare.html", compare_page(Comparison(**vars(alike) | {"pairs": alike.pairs[1:]})))
    assert browser.shown("#said") == "They do not differ by more than 0.1."


def test_a_diagnosis_of_5000_tensors(browser, tmp_path):
    assert best_of_three(browser, tmp_path / "diagnosis.html", diagnosis_page(diagnosis(SITES))) < USABLE
    assert browser("return document.images.length") == 0
    assert browser(ROWS.format("ranking-table")) == 200
    assert browser("return document.querySelector('#heat-table tbody tr span').className") == "h8"
    browser.find("body").send_keys("/")
    browser.keys("m.py:77 ")
    assert browser.shown("#found") == "11 of 5,000 tensors"  # 77 and 770 to 779
    browser.keys(Keys.ESCAPE)
    browser("document.querySelectorAll('#ranking-table th button')[4].focus()")
    browser.keys(Keys.ENTER, Keys.ENTER)
    assert browser("return document.querySelector('#ranking-table tbody td').textContent") == "t4999"
    assert browser(BACKGROUND) != browser.in_the_dark(BACKGROUND) == "rgb(20, 23, 27)"
    with browser.width(360):
        assert browser("return document.documentElement.scrollWidth") <= 360


def test_a_report_of_5000_sites(browser, tmp_path):
    plan, drawing, history = made_up(500, 20, stored=10)
    assert len(plan.sites) == SITES
    text = report_html(plan, title="made up", drawing=drawing, history=history)
    assert best_of_three(browser, tmp_path / "report.html", text) < USABLE
    browser.find("body").send_keys("/")
    browser.keys("layers.499")
    assert browser.shown("#found").startswith("10 of 5,000 tensors")
