"""What several rewrites changed in the same modules is written down, in one patch and in one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normprobe.errors import CheckpointError
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.rewrites import (
    AddQKNorm,
    Fixup,
    FuseNorms,
    MuP,
    PlainWeights,
    Reparametrise,
    Rewrite,
    SetEps,
    StoreGains,
    ToDyT,
    ToPostNorm,
)
from normprobe.targets.quiet import quiet
from tests.patching.checkpoints import llama, logits, saved
from tests.patching.training import ways

FAST = PatchOptions(level=None)
PAIRS: dict[str, tuple[Rewrite, Rewrite]] = {
    "objects": (StoreGains("one_plus_weight"), SetEps(1e-3)),
    "other objects": (MuP(base_width=16), FuseNorms()),
    "a parameter becomes a buffer": (AddQKNorm(start="calibrated"), Fixup()),
    "moved": (ToDyT(), ToPostNorm()),
    "moved before": (ToPostNorm(), SetEps(1e-3)),
    "a number of what is moved": (SetEps(1e-3), ToPostNorm()),
    "computed": (AddQKNorm(), Reparametrise()),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(llama(), tmp_path_factory.mktemp("again") / "source")


@pytest.mark.parametrize("name", PAIRS)
def test_two_rewrites_of_the_same_modules(name: str, source: Path, tmp_path: Path) -> None:
    first, second = PAIRS[name]
    patch(str(source), tmp_path / "one", [first, second], FAST)
    patch(str(patch(str(source), tmp_path / "first", [first], FAST).out), tmp_path / "two", [second], FAST)
    with quiet():
        found = [logits(way(tmp_path / folder)) for folder in ("one", "two") for way in ways().values()]
    assert all(torch.equal(each, found[0]) for each in found[1:3])
    assert all(torch.equal(each, found[3]) for each in found[4:])
    torch.testing.assert_close(found[3], found[0], rtol=1e-4, atol=1e-5)


def test_weights_that_are_no_longer_computed_are_refused(source: Path, tmp_path: Path) -> None:
    out = patch(str(source), tmp_path / "first", [Reparametrise()], FAST).out
    with pytest.raises(CheckpointError, match=r"(?s)q_proj no longer computes its weights.*what was patched then"):
        patch(str(out), tmp_path / "second", [PlainWeights()], FAST)
