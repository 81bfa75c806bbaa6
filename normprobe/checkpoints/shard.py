"""One safetensors file written tensor by tensor, in any order, and checked by reading it back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias, final

import torch
from torch import Tensor

from normprobe.checkpoints.digest import PART, digest, parts_in
from normprobe.checkpoints.dtypes import name_of
from normprobe.checkpoints.header import Header, encoded, read_header
from normprobe.errors import CheckpointError

Buffer: TypeAlias = "bytes | memoryview"
Told = Callable[[int], object]  # is told of bytes that are done


@final
class ShardWriter:
    """A new file of the size that its header says; `finish` when every tensor is in.

    Args:
        path: the file, which must not exist.
        header: as `laid_out` gave it.
        reserved: whether it takes the room for the whole file now; else what is written takes its own.

    Raises:
        OSError: the disk has no room for the whole file, or refuses.
    """

    def __init__(self, path: Path, header: Header, reserved: bool = True) -> None:
        self.path, self.header = path, header
        self.sums: dict[str, str] = {}
        self._file = path.open("xb", buffering=0)
        try:
            os.ftruncate(self._file.fileno(), header.size + header.values)
            if reserved:
                self.reserve()
            self._write(encoded(header.entries, header.metadata), 0)
        except BaseException:
            self.close()
            raise

    def reserve(self) -> None:
        """Take the room for the whole file.

        Raises:
            OSError: the disk has none.
        """
        reserve(self._file.fileno(), self.header.size + self.header.values)

    def put(self, name: str, tensor: Tensor, told: Told = lambda done: None) -> None:
        """Write the values of `tensor`, of the dtype and shape that the header says.

        Raises:
            CheckpointError: it has another dtype or shape, or is written already.
        """
        entry = self.header.entries[name]
        expected, found = (entry.dtype, entry.shape), (name_of(tensor.dtype), tuple(tensor.shape))
        if found != expected:
            raise CheckpointError(f"{self.path}: cannot write {name}", expected=str(expected), found=str(found))
        self.put_bytes(name, parts_of(bytes_of(tensor)), told)

    def put_bytes(self, name: str, parts: Iterable[Buffer], told: Told = lambda done: None) -> None:
        """Write values part by part, as they lie in another file.

        Raises:
            CheckpointError: their number is another one, and the file is spoilt; or the tensor is written already.
        """
        entry, total, done = self.header.entries[name], digest(), 0
        if name in self.sums:
            raise CheckpointError(f"{self.path}: {name} is written already")
        for part in parts:
            self._write(part, self.header.size + entry.start + done)
            total.update(part)
            done += len(part)
            told(len(part))
        if done != entry.nbytes:
            what = f"{self.path}: cannot write {name}"
            raise CheckpointError(what, expected=f"{entry.nbytes} bytes", found=f"{done} bytes")
        _start_flush(self._file.fileno(), self.header.size + entry.start, done)
        self.sums[name] = total.hexdigest()

    def finish(self) -> None:
        """Wait until the disk has it all.

        Raises:
            CheckpointError: a tensor was not written.
        """
        missing = [name for name in self.header.entries if name not in self.sums]
        if missing:
            raise CheckpointError(f"{self.path}: not all tensors were written", found=f"none for {missing[0]}")
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        """Let go of the file; a second time does nothing."""
        self._file.close()

    def _write(self, values: Buffer, place: int) -> None:
        self._file.seek(place)
        rest = memoryview(values)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]


def read_back(writer: ShardWriter, told: Told = lambda done: None) -> dict[str, str]:
    """Sums over every tensor of a finished file, after a look whether it holds what was written.

    Raises:
        CheckpointError: names, dtypes, shapes or values are others.
    """
    header = read_header(writer.path)
    if dict(header.entries) != dict(writer.header.entries) or dict(header.metadata) != dict(writer.header.metadata):
        raise CheckpointError(f"{writer.path}: read back with another header", hint="the disk may be failing")
    found = sums_in(writer.path, header, told)
    for name, total in found.items():
        if total != writer.sums[name]:
            what = f"{writer.path}: {name} reads back as other values"
            raise CheckpointError(what, hint="the disk may be failing")
    return found


def sums_in(path: Path, header: Header, told: Told = lambda done: None) -> dict[str, str]:
    """The sum over the values of every tensor of a file."""
    found = {}
    with path.open("rb", buffering=0) as stream:
        for name, entry in header.entries.items():
            total = digest()
            for part in parts_in(stream, *header.range_of(entry)):
                total.update(part)
                told(len(part))
            found[name] = total.hexdigest()
    return found


def parts_of(values: Buffer) -> Iterator[Buffer]:
    """Values in memory, part by part."""
    return (values[start : start + PART] for start in range(0, len(values), PART))


def bytes_of(tensor: Tensor) -> memoryview:
    """The values of a tensor of any dtype and shape, as they lie in memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def reserve(file: int, size: int) -> None:
    """Take the room for the whole file now, where the system can, so that a full disk shows before the work."""
    if hasattr(os, "posix_fallocate") and size:
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def _start_flush(file: int, start: int, size: int) -> None:
    """Let the disk begin with these bytes, where the system can be asked to, so that less is left to wait for."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, size, os.POSIX_FADV_DONTNEED)  # Linux writes what is dirty, and keeps it
