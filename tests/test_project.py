"""The project's own promises: commands, versions, docstrings, declared dependencies, import rules, nothing private."""

from __future__ import annotations

import ast
import importlib.metadata
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

import check_style
import megafuse

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "megafuse"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXT_SUFFIXES = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".json",
    ".sh",
    ".yml",
    ".yaml",
    ".cfg",
    ".expected",
    ".html",
    ".csv",
    "",
}
PASSED_OVER = {"build", "dist", "out", "shared", "__pycache__"}
# Written in pieces, so that this file does not hold what it looks for.
FORBIDDEN = (
    "/" + "work/",
    "/" + "root/",
    "." + "pyenv",
    "pypi" + "." + "org",
    "pythonhosted" + "." + "org",
    "download.pytorch" + "." + "org",
)
# The reference workload pins builds of PyTorch that only PyTorch's own index has.
MAY_NAME_AN_INDEX = {"rank_mixer/requirements.txt", "rank_mixer/requirements-cpu.txt"}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def is_kept(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    hidden = any(p.startswith(".") and p != ".ci" for p in parts[:-1])
    return not hidden and not PASSED_OVER.intersection(parts) and not any(p.endswith(".egg-info") for p in parts)


def listed_by_git() -> list[Path] | None:
    """Tracked and new files that git does not ignore; None where this is no git checkout."""
    if shutil.which("git") is None:
        return None
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    return [ROOT / n for n in done.stdout.decode().split("\0") if n] if done.returncode == 0 else None


def text_files() -> Iterator[Path]:
    listed = listed_by_git()
    candidates = listed if listed is not None else [p for p in ROOT.rglob("*") if is_kept(p)]
    return (p for p in candidates if p.suffix in TEXT_SUFFIXES and p.is_file())


def test_readme_leads_with_the_two_commands():
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    commands = [line.split("#")[0].strip() for line in blocks[0].splitlines() if line.strip()]
    assert commands == ["make demo", "make test"]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_named_in_documents_exist(document):
    named = set(re.findall(r"`?\bmake ([a-z][a-z-]+)`", (ROOT / document).read_text()))
    assert named, f"{document} names no make target"
    assert named <= make_targets()


def test_relative_links_of_documents_exist():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    links = [(d, t) for d in documents for t in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", d.read_text())]
    broken = [f"{d.name}: {target}" for d, target in links if not (d.parent / target).exists()]
    assert not broken


def test_continuous_integration_runs_make_test():
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script
    assert re.search(r"^make test$", script, flags=re.MULTILINE)


def test_version_is_the_same_everywhere():
    version = PYPROJECT["project"]["version"]
    assert megafuse.__version__ == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_installed_version_matches():
    try:
        installed = importlib.metadata.version("megafuse")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed: run from the source tree")
    assert installed == megafuse.__version__


def packages() -> list[str]:
    return [m.name for m in pkgutil.walk_packages([str(PACKAGE)]) if m.ispkg]


@pytest.mark.parametrize("name", ["", *packages()])
def test_every_package_has_a_docstring(name):
    tree = ast.parse((PACKAGE / Path(*name.split(".")) / "__init__.py").read_text())
    assert ast.get_docstring(tree)


def test_every_folder_with_sources_is_a_package():
    folders = {p.parent for p in PACKAGE.rglob("*.py")}
    assert [f for f in folders if not (f / "__init__.py").is_file()] == []


def third_party_imports() -> set[str]:
    names = {
        name.split(".")[0]
        for file in PACKAGE.rglob("*.py")
        for name, _ in check_style.imported_modules(ast.parse(file.read_text()))
    }
    return {n for n in names if n not in sys.stdlib_module_names and n != "megafuse"}


def test_every_import_is_a_declared_dependency():
    declared = {re.split(r"[\s<>=!~;\[]", d)[0].lower().replace("-", "_") for d in PYPROJECT["project"]["dependencies"]}
    optional = {"cuda", "cutlass"}  # vendor packages that runtime/ may import where they are installed
    assert third_party_imports() - declared - optional == set()


def test_import_does_not_initialise_cuda():
    code = "import megafuse, sys; t = sys.modules.get('torch'); sys.exit(bool(t and t.cuda.is_initialized()))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "src", timeout=120)


def test_import_leaves_no_output():
    command = [sys.executable, "-c", "import megafuse"]
    done = subprocess.run(command, cwd=ROOT / "src", capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_no_private_paths_or_registry_hosts_in_text_files():
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in text_files()
        if path.relative_to(ROOT).as_posix() not in MAY_NAME_AN_INDEX
        for word in FORBIDDEN
        if word in path.read_text(encoding="utf-8", errors="ignore")
    ]
    assert not found


def test_typed_marker_is_shipped():
    assert (PACKAGE / "py.typed").is_file()
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"]["megafuse"]


# ---------------------------------------------------------------- import rules bite

TARGETS = ("ir/graph.py", "fusion/plan.py", "fusion/inner.py", "schedule/types.py", "schedule/inner.py")
TARGETS += ("codegen/artifact.py", "codegen/program.py", "runtime/launcher.py")
VIOLATIONS = [
    ("core/planted.py", "import megafuse.ir.graph"),
    ("ir/planted.py", "import torch"),
    ("capture/planted.py", "import megafuse.fusion.plan"),
    ("fusion/planted.py", "import megafuse.schedule.types"),
    ("schedule/planted.py", "import megafuse.fusion.inner"),
    ("codegen/planted.py", "import triton"),
    ("codegen/planted.py", "import megafuse.schedule.inner"),
    ("runtime/planted.py", "import megafuse.codegen.program"),
    ("runtime/planted.py", "import megafuse.ir.graph"),
    ("validate/planted.py", "import megafuse.schedule.types"),
    ("workloads/planted.py", "import megafuse.validate"),
    ("cli/planted.py", "import triton"),
    ("bench/planted.py", "import megafuse.schedule.types"),
    ("select/planted.py", "import megafuse.runtime.launcher"),
    ("tune/planted.py", "import megafuse.schedule.types"),
]


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "lint-imports"
    if not program.exists():
        pytest.skip("import-linter is not installed")
    command = [str(program), "--no-logo", "--no-cache"]
    environment = {"PYTHONPATH": str(tree / "src"), "PATH": "/usr/bin:/bin", "NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def planted_tree(tmp_path):
    """Stands in for the package: its folders, and the few files that a planted import aims at, all empty."""

    def plant(files):
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        home = tmp_path / "src" / "megafuse"
        for package in ["", *packages()]:
            folder = home / Path(*package.split("."))
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").write_text("")
        for file in [*TARGETS, *files]:
            (home / file).write_text(files.get(file, ""))
        return lint_imports(tmp_path)

    return plant


def test_import_rules_pass_a_clean_tree(planted_tree):
    files = {
        "schedule/planted.py": "import megafuse.fusion.plan",
        "codegen/planted.py": "import megafuse.schedule.types",
        "runtime/planted.py": "import megafuse.codegen.artifact, torch, triton",
        "compiler.py": "import megafuse.fusion.plan, megafuse.runtime.planted",
    }
    done = planted_tree(files)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("file", "line"), VIOLATIONS)
def test_import_rules_catch_a_planted_violation(planted_tree, file, line):
    done = planted_tree({file: line})
    assert done.returncode == 1
    assert f"megafuse.{file.split('/')[0]}.planted -> " in done.stdout


def test_import_rules_catch_a_cycle(planted_tree):
    done = planted_tree({"ir/left.py": "import megafuse.ir.right", "ir/right.py": "import megafuse.ir.left"})
    assert done.returncode == 1
    assert "No import cycles BROKEN" in done.stdout
