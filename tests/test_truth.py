"""Facts about known models, read by hand elsewhere, where their folder is at hand."""

from __future__ import annotations

from typing import Any

import pytest

import normprobe
from tests import truth

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
pytestmark = truth.here


def compared(name: str, **changes: Any) -> list[Any]:
    """Each fact: its field, what is right, what was found, and whether these agree."""
    anatomy = normprobe.probe(*truth.build(name), level="structure").to_dict()["anatomy"]
    anatomy["streams"][0]["branches"][0].update(changes)
    module, _ = truth.checker()
    return list(module.compare(truth.entries()[name], anatomy))


@pytest.mark.parametrize("name", IDS)
def test_every_fact_is_read_right(name: str) -> None:
    facts = compared(name)
    assert len(facts) > 10
    assert [fact[:3] for fact in facts if not fact[3]] == []


def test_the_comparison_finds_a_wrong_fact() -> None:
    assert not all(fact[3] for fact in compared("llama", placement="post"))
