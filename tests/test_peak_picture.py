"""What the page draws of live bytes: areas as predicted, a line as compiled. Needs node."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import fxprec.report
from fxprec.plan.rows import LIVE

PAGE = Path(fxprec.report.__file__).parent / "page"
STUBS = """
const made = [], bytes = String, percent = String, plain = String;
const el = (name, attributes = {}, ...children) => ({ name, attributes, children });
const svg = (name, attributes = {}, ...children) => { const e = el(name, attributes, ...children); made.push(e); e.append = () => {}; return e; };
const least = (values, start) => Math.min(start, ...values), most = (values, start) => Math.max(start, ...values);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize("compiled", [[], [50, 120, 80]])
def test_what_is_compiled_is_a_line_over_what_is_predicted(compiled: list[int]) -> None:
    live = [[10 * i + k for k in range(len(LIVE))] for i in range(4)]
    peak: dict[str, Any] = {"room": 100, "beside": 0, "graphs": 2, "budget": 150, "high": 300, "planned": 110}
    peak |= {
        "compiled": max(compiled, default=None),
        "compiledLive": compiled,
        "kinds": LIVE,
        "live": live,
        "points": [],
    }
    script = (PAGE / "charts.js").read_text() + (PAGE / "peak.js").read_text()
    script += f"const found = peakOver({json.dumps(peak)}); console.log(JSON.stringify([made, found]));"
    done = subprocess.run(["node", "-e", STUBS + script], capture_output=True, text=True, check=True)
    made, found = json.loads(done.stdout)
    paths = {e["attributes"]["class"]: e["attributes"]["d"] for e in made if e["name"] == "path"}
    assert len([name for name in paths if name.startswith("area")]) == len(LIVE)
    assert "the budget of 150 is shared by 2 graphs of the step" in done.stdout
    assert ("over" in paths) == bool(compiled)
    if compiled:
        heights = [float(y) for y in re.findall(r",([\d.]+)", paths["over"])]
        assert heights.index(min(heights)) == compiled.index(max(compiled)), "the picture's y grows downwards"
        budget = next(e for e in made if e["attributes"].get("class") == "now")["attributes"]
        assert heights[1] < budget["y1"] < heights[2], "120 is above the budget of 100, 80 below"
    assert ("as compiled" in found[0]["children"][0]) == bool(compiled)
