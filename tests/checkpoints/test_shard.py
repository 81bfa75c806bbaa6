"""Safetensors files written tensor by tensor, in any order, hold what the library itself reads."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_128

from normprobe.checkpoints.dtypes import NAMES, name_of
from normprobe.checkpoints.header import laid_out, read_header
from normprobe.checkpoints.shard import ShardWriter, bytes_of, read_back
from normprobe.errors import CheckpointError

METADATA = {"format": "pt", "by": 'a "test" ü'}


def tensors() -> dict[str, Tensor]:
    """One of every dtype, a scalar, an empty one, one that is not contiguous, and names that are hard to quote."""
    torch.manual_seed(0)
    made = {f"of {dtype}": torch.randint(0, 2, (3, 5)).to(dtype) for dtype in NAMES}
    return made | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "turned": torch.randn(4, 6).T,
        'odd "name" \\ ü \n日本': torch.randn(2),
    }


def writer_of(path: Path, held: dict[str, Tensor]) -> ShardWriter:
    sizes = {n: (name_of(t.dtype), tuple(t.shape), t.numel() * t.element_size()) for n, t in held.items()}
    return ShardWriter(path, laid_out(sizes, METADATA))


def written(path: Path, held: dict[str, Tensor], order: list[str] | None = None) -> ShardWriter:
    writer = writer_of(path, held)
    for name in order or held:
        writer.put(name, held[name])
    writer.finish()
    return writer


@pytest.mark.parametrize("length", range(1, 70, 3))
def test_values_begin_where_memory_of_torch_does(length: int) -> None:
    assert laid_out({"x" * length: ("F32", (1,), 4)}, METADATA).size % 64 == 0


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(list(tensors())))
def test_any_order_gives_the_file_that_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory, order: list[str]
) -> None:
    path, held = tmp_path_factory.mktemp("shard") / "a.safetensors", tensors()
    hashes = read_back(written(path, held, order))
    with safe_open(path, framework="pt") as read:
        assert dict(read.metadata()) == METADATA
        assert set(read.keys()) == set(held)
        for name, tensor in held.items():
            got = read.get_tensor(name)
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert bytes_of(got) == bytes_of(tensor)
            assert hashes[name] == xxh3_128(bytes_of(tensor)).hexdigest()


def test_a_header_of_the_library_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    held = {name: tensor.contiguous() for name, tensor in tensors().items()}
    save_file(held, path, metadata=METADATA)
    header = read_header(path)
    assert dict(header.metadata) == METADATA
    assert {n: (e.dtype, e.shape) for n, e in header.entries.items()} == {
        n: (NAMES[t.dtype], tuple(t.shape)) for n, t in held.items()
    }
    assert header.size + header.values == path.stat().st_size


def test_other_values_on_the_disk_are_found(tmp_path: Path) -> None:
    path, held = tmp_path / "a.safetensors", {"w": torch.randn(100), "b": torch.randn(3)}
    writer = written(path, held)
    place = writer.header.size + writer.header.entries["b"].start
    with path.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([byte ^ 1]))
    with pytest.raises(CheckpointError, match="b reads back as other values"):
        read_back(writer)


def test_another_header_on_the_disk_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    writer = written(path, {"w": torch.randn(4)})
    save_file({"w": torch.zeros(2, 2)}, path, metadata=METADATA)
    with pytest.raises(CheckpointError, match="read back with another header"):
        read_back(writer)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("w", torch.zeros(4, dtype=torch.float16), "F16"),
        ("w", torch.zeros(5), r"\(5,\)"),
        ("w", torch.zeros(2, 2), r"\(2, 2\)"),
    ],
)
def test_a_tensor_of_another_form_is_refused(tmp_path: Path, name: str, tensor: Tensor, said: str) -> None:
    writer = writer_of(tmp_path / "a.safetensors", {"w": torch.zeros(4)})
    with pytest.raises(CheckpointError, match=said):
        writer.put(name, tensor)
    writer.close()


@pytest.mark.parametrize("parts", [[bytes(8)], [bytes(8), bytes(12)], [bytes(16), bytes(4)]])
def test_another_number_of_bytes_is_refused(tmp_path: Path, parts: list[bytes]) -> None:
    writer = writer_of(tmp_path / "a.safetensors", {"w": torch.zeros(4), "b": torch.zeros(1)})
    said = rf"(?s)cannot write w.*expected: 16 bytes.*found: {sum(map(len, parts))} bytes"
    with pytest.raises(CheckpointError, match=said):
        writer.put_bytes("w", parts)
    with pytest.raises(CheckpointError, match="none for w"):
        writer.finish()
    writer.close()


def test_a_tensor_left_out_and_one_written_twice_are_refused(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "a.safetensors", {"w": torch.zeros(4), "b": torch.zeros(1)})
    writer.put("w", torch.zeros(4))
    with pytest.raises(CheckpointError, match="written already"):
        writer.put("w", torch.zeros(4))
    with pytest.raises(CheckpointError, match="none for b"):
        writer.finish()
    writer.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[]}}', "twice"),
        (b"[1, 2]", "TypeError"),
        (b'{"a":{"dtype":"F32","shape":[1]}}', "data_offsets"),
        (b'{"a":', "Expecting value"),
    ],
)
def test_broken_headers_are_refused(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(CheckpointError, match=said):
        read_header(path)


@pytest.mark.parametrize("length", [0, 1, 10_000, 10**8 + 1, 2**63])
def test_a_header_of_absurd_size_is_refused_without_reading_it(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" + bytes(40))
    with pytest.raises(CheckpointError, match=f"{length:,} bytes said"):
        read_header(path)
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="0 bytes said"):
        read_header(path)
