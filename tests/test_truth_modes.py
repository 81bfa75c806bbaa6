"""The same Anatomy without values, in bfloat16, under autocast and with gradients, where many models are at hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from normprobe.errors import InputError
from tests import truth
from tests.anatomy.test_conditions import cast, differences, facts, read
from tests.models import to_meta

pytestmark = [truth.here, pytest.mark.filterwarnings("ignore")]
NAMES = list(truth.entries())

SCALES = r"\.streams\[0\]\.input_multiplier"
VALUES = r".*\.branch_scale\.value"
# What meta cannot say, by model: the places that differ, and why.
WITHOUT_VALUES = {
    "openai_gpt": r".*\.(scale|causal|factor)",  # its logits are multiplied by a mask that a buffer holds
    "gpt_neo": r".*\.window",  # the same
    "falcon/7b_multiquery": r".*\.columns",  # keys and values are picked by an index without values
    **dict.fromkeys(("gemma", "gemma2", "gemma4_text", "gemma4_text/moe", "vaultgemma", "recurrent_gemma"), SCALES),
    **dict.fromkeys(("custom_rezero", "custom_skipinit"), VALUES),  # parameters of one element
    # all experts run there; with values only those that tokens chose
    "switch_transformers": r"((.*\.branches\[5\]|\.weights).*|\.norms\[\d+\]\.over_places)",
    "deepseek_v4": r".*\.branches\[\d+\]\.kind",  # the choice of its experts is not seen: "other" there
    "hf_segformer": r".*\.(parameters|readers|writers|weights).*",  # the same ones in another order
}
# a product may be another operation in another mode
PRODUCTS = r"(\.weights\[\d+\]|.*\.entry)\.(site\.(op|ordinal)|operand)"
UNREADABLE = {
    ("hf_encodec", "meta"): "its kernel sizes are held in buffers",
    ("xlstm", "bfloat16"): "its forward mixes dtypes",
    ("deberta", "autocast"): "its masked value overflows",
}
MODES = ("bfloat16", "autocast", "gradients")


def mode_of(place: int, name: str) -> str:
    """Without values for every second model, and for each that differs there; small models take all modes elsewhere."""
    if name in WITHOUT_VALUES or (name, "meta") in UNREADABLE:
        return "meta"
    rest = MODES[place % 3]
    return "meta" if place % 2 and (name, rest) not in UNREADABLE else rest


def read_in(mode: str, name: str) -> Any:
    model, inputs = truth.build(name)
    if mode == "meta":
        return facts(read(to_meta(model), inputs))
    if mode == "bfloat16":
        return facts(read(model.to(torch.bfloat16), pytree.tree_map(lambda x: cast(x, torch.bfloat16), inputs)))
    if mode == "autocast":
        return facts(read(model, inputs, autocast="bfloat16"))
    with torch.enable_grad():
        return facts(read(model.train(), inputs))


@pytest.mark.parametrize(("place", "name"), list(enumerate(NAMES)), ids=NAMES)
def test_the_anatomy_is_the_same(place: int, name: str) -> None:
    mode = mode_of(place, name)
    if (name, mode) in UNREADABLE:
        with pytest.raises(InputError, match="raised"):
            read_in(mode, name)
        return
    accepted = "|".join((PRODUCTS, WITHOUT_VALUES.get(name, "") if mode == "meta" else ""))
    rel = 1e-6 if mode in ("meta", "gradients") else torch.finfo(torch.bfloat16).eps
    found = differences(read_in(mode, name), facts(read(*truth.build(name))), rel=rel)
    assert {k: v for k, v in found.items() if not re.fullmatch(accepted, k)} == {}, mode
