"""The dtype that a checkpoint is patched in, and which are quantised: told by how many numbers there are of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from normprobe.checkpoints.opened import opened
from normprobe.errors import CheckpointError
from normprobe.patching.built import refuse_quantised
from normprobe.patching.scratch import Scratch
from normprobe.patching.source import opened_subject
from normprobe.structure.restore import main_dtype
from normprobe.targets.options import TargetOptions
from tests.patching.checkpoints import llama, saved, stored


def test_many_small_tensors_do_not_say_the_dtype(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path / "source")
    held = {name: t if t.numel() <= 1024 else t.bfloat16() for name, t in stored(folder).items()}
    assert 2 * sum(t.dtype is torch.float32 for t in held.values()) > len(held)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with opened_subject(str(folder), TargetOptions(), Scratch(tmp_path)) as (subject, _):
        assert main_dtype(subject.model) is torch.bfloat16


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"w": torch.randn(4, 4), "places": torch.arange(8)}, None),
        ({"packed": torch.zeros(64, dtype=torch.uint8), "scale": torch.ones(8, 4)}, "U8"),
        ({"w": torch.zeros(8, 8, dtype=torch.int8), "b": torch.randn(8)}, "I8"),
    ],
)
def test_what_most_numbers_are_says_whether_it_is_quantised(
    tmp_path: Path, tensors: dict[str, Tensor], found: str | None
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with opened(tmp_path) as source:
        if found is None:
            refuse_quantised(tmp_path, source, None)
            return
        with pytest.raises(CheckpointError, match=f"is quantised(.|\\n)*weights stored as {found}"):
            refuse_quantised(tmp_path, source, None)
