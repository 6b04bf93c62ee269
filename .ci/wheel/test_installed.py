"""What `.ci/package` runs beside an installed wheel, in a folder without the source."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parents[1]


def test_everything_comes_from_the_wheel() -> None:
    import fxprec
    import fxprec.passes
    import fxprec.runtime

    site = sysconfig.get_path("purelib")
    assert all(package.__path__[0].startswith(site) for package in (fxprec, fxprec.passes, fxprec.runtime))
    assert fxprec.__version__ == metadata.version("fxprec")


def test_the_readmes_script_runs(tmp_path: Path) -> None:
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(import torch\n.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "fxprec fp8: " in done.stdout


def test_the_fixture_checks_a_model(numerics) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    numerics.check(lambda: model, torch.randn(64, 16), options={"recipe": "fp8"}, golden=False)
