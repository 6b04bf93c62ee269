"""C++ loops of a graph in files together: what they compute, what is compiled again, what cannot share."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError

import fxprec
from fxprec import compat
from fxprec.compat import units

TYPES = ["const float*", "float*", "int64_t"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def libraries(folder: Path) -> int:
    """How many of loops; others are fxprec's own kernels."""
    return sum("inductor/cpp_prefix.h" in path.with_suffix(".cpp").read_text() for path in folder.glob("*/*.main.so"))


def source(added: float, more: str = "") -> str:
    return f"""{more}
#include <torch/csrc/inductor/cpp_prefix.h>
static float helper(float x) {{ return x + {float(added)}f; }}
extern "C"  void  kernel(const float* in_ptr0, float* out_ptr0, int64_t n)
{{
    #pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out_ptr0[i] = helper(in_ptr0[i]);
}}
"""


def added_by(loop: object) -> list[float]:
    x, out = torch.arange(4.0), torch.empty(4)
    assert callable(loop)
    loop(x, out, 4)
    return (out - x).tolist()


def compiled(*sources: str) -> list[object]:
    """What a module of Inductor's code has after it waited."""
    compiler = AsyncCompile()
    with compat.loops_share_files():
        scope = {f"loop_{i}": compiler.cpp_pybinding(TYPES, text) for i, text in enumerate(sources)}
        compiler.wait(scope)
    return list(scope.values())


def test_each_loop_does_what_its_own_text_says_and_a_file_has_several(folder: Path):
    with torch._inductor.config.patch(compile_threads=2):
        loops = compiled(*(source(i) for i in range(7)))
    assert [added_by(loop) for loop in loops] == [[i] * 4 for i in range(7)]
    assert libraries(folder) == 2


def test_one_compiler_at_a_time(folder: Path):
    with torch._inductor.config.patch(compile_threads=1):
        assert [added_by(loop) for loop in compiled(source(1), source(2))] == [[1.0] * 4, [2.0] * 4]
    assert libraries(folder) == 1


def test_a_large_graph_has_more_files_than_compilers(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(units, "_MOST", 2)
    with torch._inductor.config.patch(compile_threads=1):
        compiled(*(source(i) for i in range(5)))
    assert libraries(folder) == 3


def test_a_loop_of_another_graph_is_not_compiled_again(folder: Path):
    first = compiled(source(1), source(2))
    before = libraries(folder)
    again = compiled(source(2), source(1))
    assert libraries(folder) == before
    assert again == [first[1], first[0]]
    assert added_by(compiled(source(1), source(3))[1]) == [3.0] * 4
    assert libraries(folder) == before + 1


def test_other_settings_are_other_loops():
    plain = units._settings()
    assert units._settings() == plain
    with torch._inductor.config.patch({"cpp.enable_unsafe_math_opt_flag": True}):
        assert units._settings() != plain


def test_a_library_that_is_gone_is_built_again(folder: Path):
    compiled(source(1))
    CppPythonBindingsCodeCache.cache_clear()
    for library in folder.glob("*/*.main.so"):
        shutil.rmtree(library.parent)
    assert added_by(compiled(source(1))[0]) == [1.0] * 4


def test_a_broken_entry_is_as_none(folder: Path):
    compiled(source(1))
    for text in ("", "[]", '["/nothing.so", "key", 0]', '["/nothing.so", "key", "0; x"]', "\x00"):
        CppPythonBindingsCodeCache.cache_clear()
        (entry,) = (folder / "fxprec-loops").iterdir()
        entry.write_text(text)
        assert added_by(compiled(source(1))[0]) == [1.0] * 4, text
        assert entry.read_text() != text, "written anew"


def test_what_cannot_share_compiles_alone(folder: Path, caplog: pytest.LogCaptureFixture):
    with torch._inductor.config.patch(compile_threads=1), caplog.at_level(logging.WARNING, "fxprec"):
        loops = compiled(source(1), source(2, more="#define OTHER 1"))
    assert [added_by(loop) for loop in loops] == [[1.0] * 4, [2.0] * 4]
    assert libraries(folder) == 2
    assert "2 loops compile one by one: a loop's text is not of the expected form" in caplog.text


def test_text_that_does_not_compile_fails_as_it_does_alone(caplog: pytest.LogCaptureFixture):
    with pytest.raises(CppCompileError, match="no_such_name"):
        compiled(source(1), source(2).replace("helper(in", "no_such_name(in"))


def test_another_binding_of_torchs_leaves_loops_alone(monkeypatch: pytest.MonkeyPatch):
    template = CppPythonBindingsCodeCache.suffix_template.replace("py_methods", "methods")
    monkeypatch.setattr(CppPythonBindingsCodeCache, "suffix_template", template)
    assert added_by(compiled(source(1))[0]) == [1.0] * 4


def test_outside_nothing_is_changed(folder: Path):
    with compat.loops_share_files(), compat.loops_share_files():
        unwaited = AsyncCompile().cpp_pybinding(TYPES, source(5))
    assert added_by(unwaited) == [5.0] * 4
    scope = {"loop": AsyncCompile().cpp_pybinding(TYPES, source(6))}
    AsyncCompile().wait(scope)
    assert added_by(scope["loop"]) == [6.0] * 4
    assert not (folder / "fxprec-loops").exists()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model(torch.randn(8, 16)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def trained() -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Softmax(-1))]
    backend = fxprec.Backend(fxprec.Config(recipe="fp8", low_ratio=1.0))
    return gradients(torch.compile(nn.Sequential(*layers), backend=backend))


def test_the_same_bits_from_fewer_files(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with torch._inductor.config.patch(compile_threads=2):
        together = trained()
        files = libraries(folder)
        monkeypatch.setattr(units, "_alone", None)  # as if another had taken Inductor's place
        shutil.rmtree(folder / "fxgraph")
        shutil.rmtree(folder / "aotautograd")
        alone = trained()
    assert files <= 4  # forward's, backward's
    assert libraries(folder) - files > 6
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_code_without_loops_asks_nothing_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's code from the cache waited a minute, while Inductor compiled a program for each kind of CPU."""

    def asked() -> None:
        raise AssertionError("asked for the CPU's vectors")

    monkeypatch.setattr(units, "pick_vec_isa", asked)
    assert compiled() == []


def reading(*places: int, also: str = "0.0f") -> str:
    """A loop that adds numbers of a table, and something."""
    read = " + ".join(f"in_ptr1[static_cast<int64_t>({place}L)]" for place in places)
    return f"""
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0,
                       const float* in_ptr1,
                       float* out_ptr0)
{{
    for (int64_t i = 0; i < 4; ++i) out_ptr0[i] = in_ptr0[i] + {read} + {also};
}}
"""


def bodies(folder: Path) -> int:
    return sum(path.read_text().count("namespace loop_") for path in folder.glob("*/*.main.cpp"))


TABLE = 2.0 ** torch.arange(12)
KINDS = ["const float*", "const float*", "float*"]


def read_by(*sources: str) -> list[float]:
    compiler, found = AsyncCompile(), []
    with compat.loops_share_files():
        scope = {f"loop_{i}": compiler.cpp_pybinding(KINDS, text) for i, text in enumerate(sources)}
        compiler.wait(scope)
    for loop in scope.values():
        out = torch.empty(4)
        loop(torch.zeros(4), TABLE, out)
        found.append(float(out[3]))
    return found


def test_loops_that_read_other_rows_of_a_table_are_one_function(folder: Path) -> None:
    """As those of equal layers, which read their scales."""
    assert read_by(reading(4), reading(7), reading(0), reading(9, 11), reading(3, 5)) == [16, 128, 1, 2560, 40]
    assert bodies(folder) == 2


def test_loops_that_differ_otherwise_are_functions_of_their_own(folder: Path) -> None:
    also = "in_ptr1[i]"  # a place that varies
    assert read_by(reading(4, also=also), reading(7, also=also), reading(3, 4), reading(3, 5)) == [24, 136, 24, 40]
    assert bodies(folder) == 4


def test_what_is_written_is_read_where_the_loop_says(folder: Path) -> None:
    def own(place: int) -> str:
        return reading(0).replace(
            "in_ptr0[i] +", f"(i == 3 ? out_ptr0[static_cast<int64_t>({place}L)] : in_ptr0[i] + i) +"
        )

    assert read_by(own(1), own(2)) == [2 + 1, 3 + 1]
    assert bodies(folder) == 2
