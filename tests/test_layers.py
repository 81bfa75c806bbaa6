"""House rules that the source shows by itself: imports downward only, short files, light starts."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    {"__main__"},
    {"cli"},
    {"patching"},
    {"mending", "diffing", "sweeping", "verifying", "optimising"},
    {"probing"},
    {"inputs"},
    {"report"},
    {"checks"},
    {"structure"},
    {"rewrites"},
    {"measures"},
    {"anatomy"},
    {"norms"},
    {"capture"},
    {"theory", "stats"},
    {"records"},
    {"errors", "version"},
)
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}
# The order inside a unit that has sub-packages, top to bottom.
INNER = {"anatomy": ("build", "weights", "roles", "streams", "attention", "norm_sites", "flow")}
# Units of their own, and what they may import.
ASIDE = {
    "targets": {"checkpoints", "inputs", "structure", "records", "errors", "version"},
    "checkpoints": {"errors", "version"},
    "demo": set(),
}
ABOVE_ASIDE = {"cli", "__main__", "patching"}
ROOT_UNIT = ""  # normprobe/__init__.py, which gathers the public names and may import anything
TORCHLESS = {"cli", "__main__", "report", "checks", "records", "errors"}
FILE_LINES, FUNCTION_LINES = 300, 30
TEXTS = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".cfg", ".html", ".css", ".js", ""}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def sources(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def unit_of(dotted: str) -> str:
    """The top-level unit of a dotted name: normprobe.checks.base is in `checks`."""
    return dotted.split(".")[1] if "." in dotted else ROOT_UNIT


def dotted_name(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(package: Path, path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each module of normprobe that a file imports, at any depth of nesting."""
    here = dotted_name(package, path)
    parent = here if path.name == "__init__.py" else here.rpartition(".")[0]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                ancestors = parent.split(".")
                kept = ancestors[: len(ancestors) - node.level + 1]
                base = ".".join([*kept, *([node.module] if node.module else [])])
            names = [f"{base}.{a.name}" for a in node.names] if base == "normprobe" else [base]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "normprobe")


def allowed(unit: str, other: str) -> bool:
    """Whether `unit` may import `other`."""
    if unit in {ROOT_UNIT, other}:
        return True
    if unit in ASIDE:
        return other in ASIDE[unit]
    if other in ASIDE:
        return unit in ABOVE_ASIDE
    if other not in RANK:  # a public name of the package itself, as in `from normprobe import probe`
        return other == "__version__" or unit in ABOVE_ASIDE
    return unit in RANK and RANK[unit] <= RANK[other]


def upward_imports(package: Path) -> list[str]:
    rows = []
    for path in sources(package):
        unit = unit_of(dotted_name(package, path))
        rows += [
            f"{path.relative_to(package.parent)}:{line} imports {name}"
            for line, name in imported(package, path)
            if not allowed(unit, unit_of(name))
        ]
    return rows


def upward_inside(package: Path) -> list[str]:
    """Imports against the order of the sub-packages of one unit."""
    rows = []
    for path in sources(package):
        parts = dotted_name(package, path).split(".")[1:]
        order = INNER.get(parts[0]) if len(parts) > 1 else None
        for line, name in imported(package, path) if order else ():
            other = name.split(".")[1:]
            if other[0] == parts[0] and len(other) > 1 and order.index(other[1]) < order.index(parts[1]):
                rows.append(f"{path.relative_to(package.parent)}:{line} imports {name}")
    return rows


def run_at_import(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported: not those in functions or under TYPE_CHECKING."""
    for node in nodes:
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from run_at_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from run_at_import(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from run_at_import(handler.body)


def torch_imports(package: Path) -> list[str]:
    rows = []
    for path in sources(package):
        if unit_of(dotted_name(package, path)) not in TORCHLESS:
            continue
        for node in run_at_import(parse(path).body):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "torch" for name in names):
                rows.append(f"{path.relative_to(package.parent)}:{node.lineno} imports torch")
    return rows


def too_long(package: Path) -> list[str]:
    rows = []
    for path in sources(package):
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count >= FILE_LINES:
            rows.append(f"{path.relative_to(package.parent)}: {count} lines, limit {FILE_LINES}")
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if (count := function_lines(node)) > FUNCTION_LINES:
                place = f"{path.relative_to(package.parent)}:{node.lineno} {node.name}"
                rows.append(f"{place}: {count} lines, limit {FUNCTION_LINES}")
    return rows


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, the docstring left out."""
    assert node.end_lineno is not None
    count = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        assert first.end_lineno is not None
        count -= first.end_lineno - first.lineno + 1
    return count


def machine_paths(root: Path) -> list[str]:
    """Places that name a folder of the machine that the text was written on."""
    pattern = re.compile(r"(?<![\w.])/" + r"work(?![\w-])")
    folders = ("normprobe", "tests", "examples", "docs", ".ci")
    files = [path for folder in folders for path in (root / folder).rglob("*")]
    files += list(root.iterdir())
    return [
        f"{path.relative_to(root)}:{number}"
        for path in sorted(files)
        if path.is_file() and path.suffix in TEXTS and "__pycache__" not in path.parts and path.name != ".git"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_imports_go_downward_only(root: Path) -> None:
    assert upward_imports(root / "normprobe") == []


def test_imports_inside_a_unit_go_downward_too(root: Path) -> None:
    assert upward_inside(root / "normprobe") == []


def test_report_checks_and_records_import_no_torch(root: Path) -> None:
    assert torch_imports(root / "normprobe") == []


def test_files_and_functions_are_short(root: Path) -> None:
    assert too_long(root / "normprobe") == []


def test_no_file_names_the_machine_it_was_written_on(root: Path) -> None:
    assert machine_paths(root) == []


def test_every_unit_has_a_layer(root: Path) -> None:
    package = root / "normprobe"
    units = {unit_of(dotted_name(package, path)) for path in sources(package)} - {ROOT_UNIT}
    assert units - RANK.keys() - ASIDE.keys() == set()


def plant(folder: Path, where: str, text: str) -> Path:
    """A package `normprobe` in `folder` with one file."""
    path = folder / "normprobe" / where
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    return folder / "normprobe"


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("stats.py", "import normprobe.capture.calls"),
        ("stats.py", "from normprobe.capture import calls"),
        ("stats.py", "from normprobe import capture"),
        ("stats.py", "def late():\n    from .anatomy import graph"),
        ("checks/base.py", "from ..probing import probe"),
        ("checks/__init__.py", "from .. import report"),
        ("checks/base.py", "from normprobe import probe_everything"),
        ("report/html.py", "from normprobe.targets.hub import load"),
        ("probing.py", "from normprobe.targets import resolve"),
        ("targets/hub.py", "from normprobe.capture import calls"),
        ("demo/model.py", "from normprobe.errors import NormprobeError"),
        ("inputs.py", "from normprobe.probing import probe"),
        ("unheard_of.py", "import normprobe.errors"),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, where: str, text: str) -> None:
    assert len(upward_imports(plant(tmp_path, where, text))) == 1


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("capture/calls.py", "from normprobe import stats"),
        ("checks/base.py", "from .limits import limit\nfrom ..records import Finding\nimport torch"),
        ("cli/audit.py", "from normprobe.targets import resolve\nfrom normprobe.demo import build"),
        ("targets/hub.py", "from normprobe.errors import TargetError\nfrom .gguf import read"),
        ("probing.py", "from normprobe.inputs import make\nfrom normprobe import __version__"),
        ("__init__.py", "from normprobe.probing import probe"),
    ],
)
def test_a_downward_import_is_no_violation(tmp_path: Path, where: str, text: str) -> None:
    assert upward_imports(plant(tmp_path, where, text)) == []


def test_upward_inside_is_found(tmp_path: Path) -> None:
    text = "from normprobe.anatomy.streams.adds import Write\nfrom normprobe.anatomy.flow.steps import Flow\n"
    assert upward_inside(plant(tmp_path, "anatomy/attention/ops.py", text)) == [
        "normprobe/anatomy/attention/ops.py:1 imports normprobe.anatomy.streams.adds"
    ]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("import torch", 1),
        ("from torch import nn", 1),
        ("try:\n    import torch.nn\nexcept ImportError:\n    import torch", 2),
        ("class A:\n    import torch", 1),
        ("def f():\n    import torch", 0),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", 0),
        ("import torchless", 0),
    ],
)
def test_a_torch_import_is_found_where_it_runs_at_import(tmp_path: Path, text: str, count: int) -> None:
    assert len(torch_imports(plant(tmp_path, "report/html.py", text))) == count


def test_a_long_file_and_a_long_function_are_found(tmp_path: Path) -> None:
    body = "    x = 1\n" * 30
    docstring = '    """One.\n\n    Two.\n    """\n'
    package = plant(tmp_path, "stats.py", f"def long():\n{body}\ndef fits():\n{docstring}{body[10:]}")
    assert [row.split(" ")[1] for row in too_long(package)] == ["long:"]
    (package / "theory.py").write_text("x = 1\n" * FILE_LINES)
    assert any("theory.py: 300 lines" in row for row in too_long(package))


def test_a_path_of_the_machine_is_found(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("fine: docs/" + "work, patch" + "work\nsee /" + "work/main\n")
    assert machine_paths(tmp_path) == ["README.md:2"]


def modules_after(code: str) -> set[str]:
    """Top-level modules that are loaded after `code` ran in a fresh interpreter."""
    tail = "\nimport sys; print('\\n' + ' '.join({name.split('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", code + tail]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_normprobe_does_not_import_transformers() -> None:
    loaded = modules_after("import normprobe")
    assert "normprobe" in loaded
    assert "transformers" not in loaded


def test_help_does_not_import_torch(root: Path) -> None:
    if not (root / "normprobe" / "cli" / "app.py").exists():
        pytest.skip("the command line is not there yet")
    code = """
import sys
from normprobe.cli.app import main
sys.argv = ["normprobe", "--help"]
try:
    main()
except SystemExit as stop:
    assert stop.code in (0, None), stop.code
"""
    loaded = modules_after(code)
    assert "normprobe" in loaded
    assert "torch" not in loaded
    assert "transformers" not in loaded
