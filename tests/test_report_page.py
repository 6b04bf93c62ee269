"""`report.html` in headless Chromium: no console error, and clicks and keys do what the page says they do."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("selenium.webdriver", reason="selenium is not installed (pip install selenium)")
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from fxprec.report.html import report_html
from tests.browser import chromium, needs_chromium
from tests.report_pages import made_up

pytestmark = needs_chromium
HOSTILE = "<script>alert(1)</script>"


class Report:
    """A loaded report."""

    def __init__(self, page) -> None:
        self.page = page

    def __getattr__(self, name: str):
        return getattr(self.page, name)

    def __call__(self, script: str):
        return self.page(script)

    def load(self, path, **arguments) -> None:
        plan, drawing, history = made_up(**arguments)
        self.page.load(path, report_html(plan, title="made up", drawing=drawing, history=history))

    def heading(self) -> str:
        return self.find("#detail h3").text


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield Report(found)


@pytest.fixture
def small(page, tmp_path):
    page.load(tmp_path / "report.html", groups=30, nodes=12)
    return page


def test_a_click_shows_a_group_and_a_second_one_opens_it(small):
    small.click("[data-group='2'] .title")
    assert small.heading() == "group 2: high"
    assert small("return document.querySelectorAll('[data-node]').length") == 0
    small.click("[data-group='2'] .title")
    assert small("return document.querySelectorAll('[data-group=\"2\"] [data-node]').length") == 12
    small("zoomTo(1, spotOf(nodes[24])); draw()")
    small.settle()
    small.click("[data-node='24'] rect")
    assert small.heading() == "t24"
    said = small.shown("#detail")
    assert all(text in said for text in ("t.py:2", "layers.2.t", "site 4", "bf16", "8 x 512 x 768", "group 2 of 30"))
    small.click("[data-node='25'] rect")
    assert "Not stored in a chosen format" in small.shown("#detail")
    small.click("#collapse")
    assert small("return document.querySelectorAll('[data-node]').length") == 0


def test_the_keyboard_alone_walks_opens_and_closes(small):
    small("canvas.focus()")
    small.keys(Keys.ARROW_RIGHT)
    assert small.heading() == "group 0: low"
    small.keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert small.heading() == "group 2: high"
    small.keys(Keys.ENTER)
    assert small.heading() == "t24"
    small.keys(Keys.ARROW_DOWN)
    assert small.heading() == "t25"
    small.keys(Keys.ESCAPE)
    assert small.heading() == "group 2: high"
    assert small("return open.has(2)")
    small.keys(Keys.ESCAPE)
    assert not small("return open.has(2)")
    before = small("return view.k")
    small.keys("+")
    assert small("return view.k") == pytest.approx(1.3 * before)
    small.keys("0")
    assert small("return view.k") == pytest.approx(before)


def test_dragging_pans_the_wheel_zooms_and_neither_selects(small):
    before = small("return [view.x, view.k]")
    chain = ActionChains(small.driver)
    chain.move_to_element(small.find("#canvas")).click_and_hold().move_by_offset(60, 0).release().perform()
    small.settle()
    assert small("return view.x") == pytest.approx(before[0] - 60 / before[1], abs=2)
    assert small("return selected") is None
    small("canvas.focus(); canvas.dispatchEvent(new WheelEvent('wheel', {deltaY: -200, cancelable: true}))")
    assert small("return view.k") > before[1]


def test_slash_searches_and_enter_goes_from_match_to_match(small):
    small.find("body").send_keys("/")
    small.keys("t.py:7", " ", "bf16")
    assert small.shown("#found") == "2 of 60 tensors, 2 nodes; Enter shows them in turn"
    assert small("return document.querySelectorAll('#site-table tbody tr').length") == 2
    small.keys(Keys.ENTER)
    assert small.heading() == "t84"
    small.keys(Keys.ENTER)
    assert small.heading() == "t95"
    assert small("return document.querySelectorAll('.hit').length") >= 2
    small.keys(Keys.ESCAPE)
    assert small("return document.querySelectorAll('#site-table tbody tr').length") == 60


def test_links_of_tables_chips_and_the_time_line_show_in_the_graph(small):
    small("document.querySelector('#site-table tbody tr:nth-child(3) button').click()")
    assert small.heading() == "t12"
    assert "promoted\nat step 7" in small.shown("#detail")
    small("document.querySelector('#order .chips button:nth-child(10)').click()")
    assert small.heading() == "group 9: low"
    small("document.querySelector('circle.promotion').dispatchEvent(new MouseEvent('click'))")
    assert small.heading() == "t12"
    small("document.querySelector('#gemm-table tbody button').click()")
    assert small.heading() == "t12"
    assert small("return document.querySelectorAll('#detail figure').length") == 2


def test_bars_ratios_and_sorting(small):
    widths = small("return [...document.querySelectorAll('#bars i')].map(e => e.style.width)")
    assert [float(w.rstrip("%")) for w in widths] == pytest.approx([100, 50, 100 * (10 * 1 + 20 * 2) / 30 / 4])
    assert small("return document.querySelectorAll('#ratios tbody tr').length") == 10
    small("document.querySelectorAll('#site-table th button')[4].click()")
    first = "return document.querySelector('#site-table tbody tr td:nth-child(5)').textContent"
    assert (small(first), small("return document.querySelectorAll('#site-table th')[4].ariaSort")) == (
        "29",
        "descending",
    )
    small("document.querySelectorAll('#site-table th button')[4].click()")
    assert small(first) == "0"


def test_names_are_text(page, tmp_path):
    page.load(tmp_path / "report.html", groups=3, nodes=4, name=HOSTILE)
    page("select(nodes[4])")
    assert page.heading() == f"{HOSTILE}4"
    assert page("return document.scripts.length") == 2


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_no_wider_than_the_window(small, width):
    with small.width(width):
        assert small("return document.documentElement.scrollWidth") <= width
        detail, graph = (
            small(f"return document.getElementById('{i}').getBoundingClientRect().left") for i in ("detail", "canvas")
        )
        assert (detail > graph) == (width > 900)


def test_dark_follows_the_system(small):
    background = "return getComputedStyle(document.body).backgroundColor"
    assert (small(background), small.in_the_dark(background)) == ("rgb(255, 255, 255)", "rgb(20, 23, 27)")


def test_ten_thousand_nodes_load_open_and_move(page, tmp_path):
    start = time.monotonic()
    page.load(tmp_path / "report.html", groups=250, nodes=40)
    assert page("return document.querySelectorAll('[data-group]').length") == 250
    page.click("#expand")
    assert page("return open.size") == 250
    drawn = page("return scene.querySelectorAll('*').length")
    assert drawn < 5000  # from afar, one outline a colour and group
    page("select(nodes[7777])")
    page.settle()
    assert page.heading() == "t7777"
    assert page("return document.querySelectorAll('[data-node]').length") < 1500  # what is in sight, and some more
    assert time.monotonic() - start < 20
