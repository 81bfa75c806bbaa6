"""What is shipped and pinned: the wheel holds all data, CI's versions are exact, bounds are tested ones."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from normprobe.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

INSTALLED_BY_CI = ("dev", "gguf")


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources without network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(root / name, source)
    shutil.copytree(root / "normprobe", source / "normprobe", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--wheel-dir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


def pins(path: Path) -> dict[str, list[Requirement]]:
    """The requirements of a constraints file by name."""
    rows: dict[str, list[Requirement]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if text := line.split("#")[0].strip():
            requirement = Requirement(text)
            rows.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return rows


def required(project: dict[str, Any], extras: tuple[str, ...] = INSTALLED_BY_CI) -> list[Requirement]:
    optional = project["optional-dependencies"]
    texts = project["dependencies"] + [text for extra in extras for text in optional[extra]]
    return [Requirement(text) for text in texts]


def pinned_version(requirement: Requirement) -> Version:
    """The version of an exact pin."""
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", f"{requirement} is not exact"
    assert "*" not in specifier.version, f"{requirement} is not exact"
    return Version(specifier.version)


def test_the_wheel_holds_every_file_of_the_package(root: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    here = {
        path.relative_to(root).as_posix()
        for path in (root / "normprobe").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shipped == here
    assert {"normprobe/py.typed", "normprobe/demo/model.safetensors", "normprobe/demo/heldout.txt"} <= shipped


def test_the_wheel_names_its_version_command_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
    assert "normprobe = normprobe.cli.app:main" in points
    assert f"\nVersion: {__version__}\n" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_demo_model_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import normprobe.demo as d; m, t = d.build(); print(d.__file__, tuple(m(t).shape))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "normprobe/demo/__init__.py"), "(1,", "128,", "61)"]


def test_every_requirement_is_pinned_within_its_bounds(root: Path, project: dict[str, Any]) -> None:
    pinned = pins(root / "constraints.txt")
    for requirement in required(project, INSTALLED_BY_CI):
        for pin in pinned[canonicalize_name(requirement.name)]:
            assert requirement.specifier.contains(pinned_version(pin)), f"{pin} is outside {requirement}"


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])
def test_constraints_are_exact_and_name_a_package_once_for_each_python(root: Path, name: str) -> None:
    for package, requirements in pins(root / name).items():
        assert all(pinned_version(requirement) for requirement in requirements)
        for version in ("3.10", "3.11", "3.13"):
            environment = {"python_version": version}
            active = [r for r in requirements if r.marker is None or r.marker.evaluate(environment)]
            assert len(active) <= 1, f"{package} has {len(active)} pins for Python {version}"


def test_lower_bounds_are_the_versions_that_test_oldest_installs(root: Path, project: dict[str, Any]) -> None:
    oldest = pins(root / "constraints-oldest.txt")
    for requirement in required(project, ("gguf",)):
        (specifier,) = requirement.specifier
        assert specifier.operator == ">="
        (pin,) = oldest[canonicalize_name(requirement.name)]
        assert pinned_version(pin) == Version(specifier.version)


def test_torchvision_is_nowhere_required(root: Path, project: dict[str, Any]) -> None:
    names = {r.name for r in required(project, tuple(project["optional-dependencies"]))}
    for name in ("constraints.txt", "constraints-oldest.txt"):
        names |= pins(root / name).keys()
    assert "torch" in names
    assert "torchvision" not in names


def test_ci_is_one_bash_script_that_runs_make_test(root: Path) -> None:
    script = root / ".ci" / "run"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "set -euo pipefail" in script.read_text()
    assert os.access(script, os.X_OK)


def planned(root: Path, target: str, venv: Path) -> list[str]:
    """The commands that `make target` would run."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    command = ["make", "--no-print-directory", "-n", target, f"VENV={venv}", "PYTHON=python-of-choice"]
    given = {"MAKEFLAGS", "MAKELEVEL", "WORKERS"}  # to the make that runs this test
    environment = {key: value for key, value in os.environ.items() if key not in given}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, env=environment)
    return [line.replace(str(venv), "VENV") for line in done.stdout.splitlines()]


def test_make_demo_installs_with_constraints_and_then_runs(root: Path, tmp_path: Path) -> None:
    commands = planned(root, "demo", tmp_path / "venv")
    assert commands[0] == "python-of-choice -m venv VENV"
    installs = [line for line in commands if " install " in line]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in line for line in installs)
    assert commands[-1] == "VENV/bin/normprobe demo"


def test_make_test_installs_with_constraints_and_then_checks(root: Path, tmp_path: Path) -> None:
    commands = planned(root, "test", tmp_path / "venv")
    installs = [line for line in commands if " install " in line]
    assert len(installs) == 3
    assert all("--constraint constraints.txt" in line for line in installs)
    assert [line for line in commands if re.match(r"VENV/bin/(ruff|mypy|pytest)", line)] == [
        "VENV/bin/ruff check .",
        "VENV/bin/ruff format --check .",
        "VENV/bin/mypy --num-workers 2",
        "VENV/bin/pytest --numprocesses 2 --dist worksteal",
    ]


def test_a_second_make_demo_installs_nothing(root: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / ".installed-demo").touch()
    assert planned(root, "demo", tmp_path) == ["VENV/bin/normprobe demo"]
