"""Checkpoints for the tests of patches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patching.checkpoints import checkpoint


@pytest.fixture(scope="session")
def _base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def source(tmp_path: Path, _base: Path) -> Callable[[str], Path]:
    """Gives the folder of a fresh checkpoint by name."""
    return lambda name: checkpoint(tmp_path, name, _base)
