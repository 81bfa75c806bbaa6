"""Facts about known models, read by hand elsewhere, where their folder is at hand."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import normprobe

IDS = (
    "gpt2",
    "gpt_neox",
    "gpt_neox/sequential",
    "opt/pre",
    "opt/post_350m",
    "llama",
    "bert",
    "t5",
    "gemma2",
    "qwen3",
    "olmo2",
    "torch_encoder_postln_nofinal",
    "torch_encoder_preln_nofinal",
    "torch_encoder_preln_final",
)


@pytest.fixture(scope="module")
def checker(shared_folder: Path) -> Any:
    """The script that compares, imported without the settings that it makes for all of the process."""
    import warnings

    path = shared_folder / "truth" / "check_truth.py"
    spec = importlib.util.spec_from_file_location("check_truth", path)
    assert spec is not None
    assert spec.loader is not None
    module, disabled, search = importlib.util.module_from_spec(spec), logging.root.manager.disable, list(sys.path)
    with warnings.catch_warnings():
        spec.loader.exec_module(module)
        names = module.names(path.parent)
    logging.disable(disabled)
    sys.path[:] = search
    return module, names


@pytest.fixture(scope="module")
def entries(shared_folder: Path) -> dict[str, Any]:
    texts = [(shared_folder / "truth" / f).read_text(encoding="utf-8") for f in ("text.yaml", "media.yaml")]
    return {entry["id"]: entry for text in texts for entry in yaml.load(text, yaml.CSafeLoader)}


@pytest.mark.parametrize("name", IDS)
def test_every_fact_is_read_right(name: str, checker: tuple[ModuleType, Any], entries: dict[str, Any]) -> None:
    module, names = checker
    model, inputs = module.build(entries[name], names)
    anatomy = normprobe.probe(model, inputs, level="structure").to_dict()["anatomy"]
    facts = list(module.compare(entries[name], anatomy))
    assert len(facts) > 10
    assert [fact[:3] for fact in facts if not fact[3]] == []


def test_the_comparison_finds_a_wrong_fact(checker: tuple[ModuleType, Any], entries: dict[str, Any]) -> None:
    module, names = checker
    model, inputs = module.build(entries["llama"], names)
    anatomy = normprobe.probe(model, inputs, level="structure").to_dict()["anatomy"]
    anatomy["streams"][0]["branches"][0]["placement"] = "post"
    assert not all(fact[3] for fact in module.compare(entries["llama"], anatomy))
