"""The repository's layout is importable as it lies: ``passes/`` is ``fxprec.passes``, and ``runtime/`` ``fxprec.runtime``."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import grimp
import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
WHERE = "import fxprec.passes.base, fxprec.runtime.table as table; print(fxprec.__file__); print(table.__file__)"


def imported_in(folder: Path) -> list[str]:
    command = [sys.executable, "-c", WHERE]
    environment = {"PATH": "/usr/bin:/bin"}  # no PYTHONPATH
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def is_editable() -> bool:
    """Return whether the package under test is this folder, installed as README says, and not a wheel or a PYTHONPATH."""
    paths = Path(sysconfig.get_path("purelib")).glob("__editable__.fxprec-*.pth")
    return any(path.read_text().strip() == str(ROOT) for path in paths)


def test_in_the_root_it_imports_without_being_installed() -> None:
    """Also where a wheel is installed: the folder comes first, and has all packages."""
    found = imported_in(ROOT)
    assert found == [str(ROOT / "fxprec" / "__init__.py"), str(ROOT / "fxprec" / "runtime" / "table.py")]


@pytest.mark.skipif(not is_editable(), reason="fxprec is not installed from this folder by `pip install -e .`")
def test_beside_a_clone_named_fxprec_the_installed_package_is_found(tmp_path: Path) -> None:
    """A folder named like the package and without ``__init__.py`` is a namespace package, where none comes after it."""
    (tmp_path / "fxprec" / "fxprec").mkdir(parents=True)
    assert imported_in(tmp_path)[0] == str(ROOT / "fxprec" / "__init__.py")


def test_an_editable_install_is_a_plain_path() -> None:
    """Editors and type checkers read ``.pth`` files with paths, and run no import hooks."""
    from setuptools.dist import Distribution

    distribution = Distribution()
    distribution.parse_config_files([str(ROOT / "pyproject.toml")])
    assert distribution.package_dir == {"": "."}
    assert distribution.packages is not None
    for package in distribution.packages:
        assert (ROOT / Path(*package.split(".")) / "__init__.py").is_file(), package


def test_every_package_is_installed() -> None:
    from setuptools.dist import Distribution

    distribution = Distribution()
    distribution.parse_config_files([str(ROOT / "pyproject.toml")])
    rooms = {"fxprec": ROOT / "fxprec", "fxprec.passes": ROOT / "passes", "fxprec.runtime": ROOT / "runtime"}
    found = {
        ".".join((name, *path.parent.relative_to(room).parts))
        for name, room in rooms.items()
        for path in room.rglob("__init__.py")
    }
    assert set(distribution.packages or ()) == found


@pytest.fixture(scope="module")
def imports() -> nx.DiGraph[str]:
    """Return the modules of fxprec, and who imports whom, inside functions too; what type checkers see is left out."""
    found = grimp.build_graph("fxprec", exclude_type_checking_imports=True, cache_dir=None)
    return nx.DiGraph((a, b) for a in found.modules for b in found.find_modules_directly_imported_by(a))


def test_no_modules_import_each_other(imports: nx.DiGraph[str]) -> None:
    assert imports.has_edge("fxprec.passes.pipeline", "fxprec.passes.base"), "passes/ is read through its link"
    assert [circle for circle in nx.strongly_connected_components(imports) if len(circle) > 1] == []


def test_below_the_passes_nothing_imports_a_pass(imports: nx.DiGraph[str]) -> None:
    folders = ("analysis", "casts", "forms", "crossings", "lowering")
    shared = ("base", "budget_part", "notice", "sites")  # what passes read and fill, and how they make nodes

    def floor(module: str) -> int:
        room = module.split(".")[2]
        return folders.index(room) if room in folders else 0 if room in shared else len(folders)

    inside = [(a, b) for a, b in imports.edges if a.count(".") > 1 and a[:14] == b[:14] == "fxprec.passes."]
    assert len(inside) > 400
    assert [f"{a} imports {b}" for a, b in inside if floor(a) < floor(b)] == []
