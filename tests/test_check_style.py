"""tools/check_style.py finds what it says it finds, and nothing else."""

from __future__ import annotations

import textwrap

import pytest

import check_style


@pytest.fixture
def tree(tmp_path):
    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return tmp_path

    return write


def findings(root):
    return [str(f) for f in check_style.find_all(check_style.read_sources(root))]


def function_of(lines):
    return "def f():\n" + "    x = 1\n" * (lines - 1)


def test_a_clean_file_passes(tree, capsys):
    root = tree("src/megafuse/api.py", "import math\n\n\ndef area(r):\n    return math.pi * r * r\n")
    assert check_style.main([str(root)]) == 0
    assert "0 findings" in capsys.readouterr().out


@pytest.mark.parametrize(("lines", "count"), [(400, 0), (401, 1)])
def test_file_length(tree, lines, count):
    assert len(findings(tree("src/megafuse/a.py", "x = 1\n" * lines))) == count


@pytest.mark.parametrize(("lines", "count"), [(60, 0), (61, 1)])
def test_function_length(tree, lines, count):
    found = findings(tree("src/megafuse/a.py", function_of(lines)))
    assert len(found) == count
    assert all("f() has 61 lines, limit 60" in f for f in found)


def test_import_inside_a_function(tree):
    code = "def f():\n    import os\n    return os\n"
    assert findings(tree("src/megafuse/api.py", code)) == [
        "src/megafuse/api.py:2: import inside f(); move it to the top of the file"
    ]


def test_import_inside_a_function_is_allowed_in_runtime(tree):
    assert findings(tree("src/megafuse/runtime/driver.py", "def f():\n    import triton\n    return triton\n")) == []


def test_several_stages_outside_the_driver(tree):
    code = "from megafuse.capture import joint\nfrom megafuse import fusion\n"
    (found,) = findings(tree("src/megafuse/api.py", code))
    assert "imports several stages (capture, fusion)" in found


def test_the_driver_may_import_several_stages(tree):
    assert (
        findings(tree("src/megafuse/compiler.py", "import megafuse.capture.joint\nimport megafuse.fusion.plan\n")) == []
    )


def test_relative_import(tree):
    (found,) = findings(tree("src/megafuse/ir/a.py", "from . import ops\n"))
    assert "relative import" in found


@pytest.mark.parametrize("path", ["src/megafuse/golden/k.py", "src/megafuse/generated.py"])
def test_golden_and_generated_files_are_exempt(tree, path):
    assert findings(tree(path, f"{check_style.GENERATED_MARK}\n" + "x = 1\n" * 500)) == []


def test_exit_status_and_list(tree, capsys):
    root = tree("src/megafuse/a.py", function_of(70))
    assert check_style.main([str(root)]) == 1
    assert "src/megafuse/a.py:1: f() has 70 lines" in capsys.readouterr().out
