"""Nothing in the documentation, or in a comment that points to it, hangs in the air."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from fxprec.passes import pipeline
from fxprec.passes.analysis import sensitive
from fxprec.plan.rows import Reads

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY"))])
SOURCES = [p for room in ("fxprec", "passes", "runtime", "tests", "benchmarks") for p in ROOT.glob(f"{room}/**/*.py")]
EXAMPLES = re.compile(r"count_casts|count-casts|my_pass")  # what the pages invent to show how it is done


@cache
def headings(page: Path) -> frozenset[str]:
    return frozenset(re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_heading_that_a_comment_names_exists() -> None:
    lost = []
    for path in [*PAGES, *SOURCES]:
        text = re.sub(r"\s+#?\s*", " ", path.read_text(encoding="utf-8"))
        for page, heading in re.findall(r'docs/(\w+\.md), "([^"]+)"', text):
            if heading not in headings(ROOT / "docs" / page):
                lost.append(f"{path.relative_to(ROOT)}: docs/{page} has no heading {heading!r}")
    assert not lost


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_and_every_file_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    named = re.findall(r"`((?:fxprec|passes|runtime|tests|benchmarks|examples)/[\w./-]+\.\w+)", text)
    assert [target for target in links if target and not (page.parent / target).exists()] == []
    assert [name for name in named if not (ROOT / name).exists() and not EXAMPLES.search(name)] == []


def test_the_architecture_lists_the_passes_in_their_order() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \d+ \| ([\w-]+) \|", text, re.MULTILINE) == [step.name for step in pipeline.PIPELINE]
    assert re.findall(r"^\| S\d+ \| ([\w-]+) \|", text, re.MULTILINE) == [step.name for step in pipeline.SIMULATION]
    assert f"pipeline of {len(pipeline.SIMULATION)} or {len(pipeline.PIPELINE)} passes" in text


def test_the_page_on_compute_has_each_entry_of_the_tables_of_sensitive_values() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", (ROOT / "docs/compute.md").read_text(encoding="utf-8"), re.MULTILINE)
    for role, table in (("result of", sensitive.RESULTS), ("operand of", sensitive.OPERANDS)):
        for name, entry in table.items():
            (what,) = [what for what, why in rows if f"`{name}`" in what and why == entry.why and what.startswith(role)]
            assert ("*own*" in what) == entry.as_it_is, name
    for entry in (sensitive.EXPONENTIATED, sensitive.STATISTIC, sensitive.COMPARED):
        assert [("*own*" in what) for what, why in rows if why == entry.why] == [entry.as_it_is]


def test_the_page_on_compute_names_every_answer_to_who_reads() -> None:
    text = (ROOT / "docs/compute.md").read_text(encoding="utf-8")
    assert re.findall(r'^\| `"([\w ]+)"` \|', text, re.MULTILINE) == list(get_args(Reads))
