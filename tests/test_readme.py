"""The README holds: its Python runs, and the commands that it names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

from normprobe.records.anatomy import BranchKind
from normprobe.records.norms import NormKind, NormRole

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


RUN = "import runpy, sys; [(print(path), runpy.run_path(path, run_name='__main__')) for path in sys.argv[1:]]"


def test_python_blocks_run(root: Path, tmp_path: Path) -> None:
    """Each with names of its own, in one process; the last path in what it printed is that of the block that failed."""
    scripts = []
    for number, code in enumerate((*blocks("python"), *blocks("python", TRAINING))):
        scripts.append(tmp_path / f"block{number}.py")
        scripts[-1].write_text(code, encoding="utf-8")
    assert len(scripts) > 3
    command = [sys.executable, "-c", RUN, *map(str, scripts)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, (done.stdout, done.stderr)


def test_there_is_a_python_block() -> None:
    assert blocks("python")
    assert len(blocks("python", TRAINING)) == 3


def test_make_targets_exist(root: Path) -> None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert named >= {"demo", "test"}
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_normprobe_commands_exist() -> None:
    named = set(re.findall(r"^normprobe ([a-z]+)", "\n".join(blocks("bash")), re.MULTILINE))
    assert "audit" in named
    command = [sys.executable, "-m", "normprobe", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    assert named <= set(re.findall(r"[a-z]+", done.stdout))


def test_links_lead_to_files(root: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (root / link).exists()] == []


def test_the_demo_prints_what_the_readme_shows(root: Path) -> None:
    """Word for word; digits and bars may differ from one processor to another."""
    environment = os.environ | {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "normprobe", "demo"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
    (shown,) = blocks("text")
    words = [re.sub(r"[-\d.▁-█]+", "", text).split() for text in (shown, done.stdout)]
    assert words[0] == words[1]


def test_the_anatomy_page_names_every_kind_and_role(root: Path) -> None:
    page = (root / "docs" / "anatomy.md").read_text(encoding="utf-8")
    names = {*get_args(BranchKind), *get_args(NormKind), *get_args(NormRole)}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
