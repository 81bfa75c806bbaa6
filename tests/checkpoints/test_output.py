"""What is put is written beside the caller's work, and nothing of it is lost."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from xxhash import xxh3_128

from normprobe.checkpoints.opened import Opened, opened
from normprobe.checkpoints.output import Output, same_layout
from normprobe.checkpoints.shard import ShardWriter, bytes_of
from normprobe.errors import CheckpointError

LARGE = 1 << 15  # numbers of float32 that are worth a mapping


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Opened]:
    torch.manual_seed(0)
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    save_file(
        {name: torch.randn(LARGE) for name in "abc"} | {"small": torch.randn(3)}, tmp_path / "in/model.safetensors"
    )
    with opened(tmp_path / "in") as found:
        yield found


@pytest.fixture
def output(source: Opened, tmp_path: Path) -> Iterator[Output]:
    found = Output(tmp_path / "out", same_layout(source), source)
    yield found
    found.close()
    assert not [each.name for each in threading.enumerate() if each.name.startswith("normprobe-")]


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits for it."""
    go, write = threading.Event(), ShardWriter.put

    def put(self: ShardWriter, name: str, tensor: Tensor, *told: object) -> None:
        assert go.wait(10)
        write(self, name, tensor, *told)

    monkeypatch.setattr(ShardWriter, "put", put)
    yield go
    go.set()


def read(output: Output) -> dict[str, Tensor]:
    return load_file(output.folder / "model.safetensors")


def test_what_is_put_is_written_and_the_rest_is_copied(output: Output, source: Opened) -> None:
    output.put("b", torch.ones(LARGE))
    sums = output.finish()["model.safetensors"]
    found = read(output)
    assert torch.equal(found.pop("b"), torch.ones(LARGE))
    assert all(torch.equal(tensor, source.tensors[name]) for name, tensor in found.items())
    assert sums["a"] == xxh3_128(bytes_of(source.tensors["a"])).hexdigest()
    assert sums["b"] == xxh3_128(bytes_of(torch.ones(LARGE))).hexdigest()


def test_the_caller_goes_on_while_it_is_written(output: Output, held_up: threading.Event) -> None:
    told: list[Tensor | None] = []
    output.put("a", torch.ones(LARGE), told.append)
    assert told == []
    held_up.set()
    output.settle()
    assert len(told) == 1
    assert told[0] is not None
    assert torch.equal(told[0], torch.ones(LARGE))


def test_one_write_waits_for_the_one_before(output: Output) -> None:
    told: list[str] = []
    for name in "abc":
        output.put(name, torch.ones(LARGE), lambda mapped, name=name: told.append(name))
        assert told == list("abc"[: "abc".index(name)])
    output.finish()
    assert told == list("abc")


def test_what_is_mapped_is_the_file_and_takes_no_memory_of_its_own(output: Output) -> None:
    mapped: list[Tensor | None] = []
    output.put("a", torch.ones(LARGE), mapped.append)
    output.put("small", torch.ones(3), mapped.append)
    output.settle()
    assert mapped[0] is not None
    assert mapped[1] is None
    places = [row for row in Path("/proc/self/maps").read_text().splitlines() if str(output.folder) in row]
    begin, end = (int(word, 16) for word in places[0].split()[0].split("-"))
    assert begin <= mapped[0].data_ptr() < end


def test_the_last_values_of_a_name_stand(output: Output, held_up: threading.Event) -> None:
    held_up.set()
    for value in (1.0, 2.0, 3.0):
        output.put("a", torch.full((LARGE,), value))
    output.finish()
    assert torch.equal(read(output)["a"], torch.full((LARGE,), 3.0))


@pytest.mark.parametrize("at", ["put", "settle", "finish"])
def test_what_goes_wrong_beside_the_work_is_raised_at_the_next_call(output: Output, at: str) -> None:
    output.put("a", torch.ones(5))
    with pytest.raises(CheckpointError, match=r"cannot write a"):
        output.put("b", torch.ones(LARGE)) if at == "put" else getattr(output, at)()


def test_closing_waits_for_the_write_that_goes_on(source: Opened, tmp_path: Path, held_up: threading.Event) -> None:
    output = Output(tmp_path / "out", same_layout(source), source)
    output.put("a", torch.ones(LARGE))
    threading.Timer(0.2, held_up.set).start()
    output.close()
    assert held_up.is_set()


@pytest.mark.skipif(os.name != "posix", reason="no blocks are told")
def test_what_is_not_reserved_takes_its_room_as_it_is_written_and_the_rest_in_the_end(
    source: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output(tmp_path / "out", same_layout(source), source, reserved=False)
    file, reserved = tmp_path / "out" / "model.safetensors", list[int]()
    output.put("b", torch.ones(LARGE))
    output.settle()
    assert 4 * LARGE <= 512 * file.stat().st_blocks < 8 * LARGE
    monkeypatch.setattr(ShardWriter, "put_bytes", lambda *args: reserved.append(512 * file.stat().st_blocks))
    with pytest.raises(CheckpointError, match="not all tensors were written"):
        output.finish()
    assert reserved[0] >= 12 * LARGE
    output.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="this system lists no open files")
def test_files_are_let_go_of_where_one_cannot_be_made(source: Opened, tmp_path: Path) -> None:
    rooms = same_layout(source)["model.safetensors"]
    (tmp_path / "out" / "2.safetensors").write_text("in the way")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(FileExistsError, match=r"2\.safetensors"):
        Output(tmp_path / "out", {"1.safetensors": {"a": rooms["a"]}, "2.safetensors": {"b": rooms["b"]}}, source)
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_index_counts_what_lies_in_the_files(source: Opened, tmp_path: Path) -> None:
    rooms = same_layout(source)["model.safetensors"]
    stale = replace(source, index={"metadata": {"total_parameters": 1, "total_size": 2, "by": "hand"}})
    layout = {f"{name}.safetensors": {name: rooms[name]} for name in ("a", "small")}
    output = Output(tmp_path / "out", layout, stale)
    output.finish()
    output.close()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": LARGE + 3, "total_size": 4 * (LARGE + 3), "by": "hand"}
    assert index["weight_map"] == {"a": "a.safetensors", "small": "small.safetensors"}
