"""What keeps the patch of a large checkpoint short and small."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from xxhash import xxh3_128

from normprobe.checkpoints import digest as sums
from normprobe.checkpoints import opened as module
from normprobe.checkpoints.opened import hashing, opened
from normprobe.patching.options import FEW, FEWEST, PatchOptions
from normprobe.patching.run import patch
from normprobe.patching.writing import Writing
from normprobe.rewrites import AddQKNorm, FoldGains, Initialise, QKClip, Rewrite, SetEps, Site
from normprobe.targets.options import TargetOptions
from tests.patching.checkpoints import llama, stored


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "in", max_shard_size="20KB")
    return tmp_path / "in"


def test_the_hash_of_the_source_is_that_of_its_files_one_after_the_other(sharded: Path) -> None:
    with opened(sharded) as source, hashing(source) as found:
        assert len(source.files) > 2
        assert found.result() == xxh3_128(b"".join(path.read_bytes() for path in source.files)).hexdigest()


def test_the_hash_is_given_up_where_the_work_fails(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    class Slow:
        def update(self, part: bytes) -> None:
            hashed.append(len(part))
            time.sleep(0.02)

        def hexdigest(self) -> str:
            return ""

    monkeypatch.setattr(sums, "PART", 1024)
    monkeypatch.setattr(module, "digest", Slow)
    with pytest.raises(ZeroDivisionError), opened(sharded) as source, hashing(source):
        raise ZeroDivisionError
    assert sum(hashed) < source.nbytes / 2
    assert not [each.name for each in threading.enumerate() if each.name.startswith("normprobe-")]


def test_bytes_that_are_told_grow_to_the_total_from_whatever_thread(sharded: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    patch(str(sharded), tmp_path / "out", [FoldGains()], PatchOptions(level=None), lambda *each: told.append(each))
    written = [(done, total) for stage, done, total in told if stage == "write"]
    assert written == sorted(written)
    assert {total for _, total in written} == {written[-1][0]}


def test_the_stages_are_told_as_they_begin(sharded: Path, tmp_path: Path) -> None:
    told: list[str] = []
    rewrites = [FoldGains(), Initialise()]
    patch(str(sharded), tmp_path / "out", rewrites, tell=lambda stage, *_: told.append(stage))
    stages = [stage for number, stage in enumerate(told) if not number or stage != told[number - 1]]
    once = ["write", "proof"]
    assert stages == ["audit", "FoldGains", *once, "Initialise", *once, "write", "check", "audit"]


@pytest.mark.parametrize(
    ("rewrites", "options", "size", "tokens"),
    [
        ([FoldGains(), Initialise()], PatchOptions(level=None), 2 << 30, FEW),
        (
            [FoldGains(), Initialise()],
            PatchOptions(level=None),
            (2 << 30) + 1,
            FEWEST,
        ),  # of which no wider copy is made
        ([FoldGains(), AddQKNorm(start="calibrated")], PatchOptions(level=None), 1, None),
        ([QKClip(limit=50.0)], PatchOptions(level=None), 1, None),
        ([FoldGains()], PatchOptions(), 8 << 30, None),
        ([SetEps(eps=1e-5)], PatchOptions(level=None, mend="exact"), 1, None),
        ([FoldGains()], PatchOptions(level=None, target=TargetOptions(tokens=7)), 8 << 30, 7),
        ([FoldGains()], PatchOptions(level=None, target=TargetOptions(text="some words")), 1, None),
    ],
)
def test_the_row_is_short_where_nothing_is_measured_on_it(
    rewrites: list[Rewrite], options: PatchOptions, size: int, tokens: int | None
) -> None:
    assert options.inputs_for(rewrites, size).tokens == tokens


def test_what_is_noted_is_written_once_more(tmp_path: Path) -> None:
    name = "lm_head.weight"
    llama().save_pretrained(tmp_path / "in")
    (tmp_path / "part").mkdir()
    site = Site("lm_head", "", (name,), forward=False)
    with opened(tmp_path / "in") as source:
        model = type(llama()).from_pretrained(None, config=llama().config, state_dict=dict(source.tensors))
        writing = Writing(tmp_path / "part", model, source, None, lambda done: None)
        for value, tell in ((1.0, writing.changed), (2.0, lambda site: writing.noted([site]))):
            parameter = model.get_parameter(name)
            parameter.data = torch.full_like(parameter, value)
            tell(site)
            writing.settle()
        writing.finish()
        writing.close()
    assert bool((stored(tmp_path / "part")[name] == 2.0).all())


def test_values_that_came_while_others_were_written_stay(tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    config = llama().config
    config.vocab_size = 2048
    type(llama())(config).save_pretrained(tmp_path / "large")
    (tmp_path / "part").mkdir()
    with opened(tmp_path / "large") as source:
        model = type(llama()).from_pretrained(None, config=config, state_dict=dict(source.tensors))
        writing = Writing(tmp_path / "part", model, source, None, lambda done: None)
        parameter = model.get_parameter(name)
        parameter.data = torch.ones_like(parameter)
        writing.changed(Site("model.embed_tokens", "", (name,), forward=False))
        parameter.data = torch.full_like(parameter, 2.0)
        writing.settle()
        assert bool((parameter == 2.0).all())
        writing.changed(Site("model.embed_tokens", "", (name,), forward=False))
        before = parameter.data_ptr()
        writing.settle()
        assert parameter.data_ptr() != before
        assert bool((parameter == 2.0).all())
        writing.close()
