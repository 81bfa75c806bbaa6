"""The weight files of a new checkpoint: laid out beforehand, filled in any order, the rest copied as it lies."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from normprobe.checkpoints.behind import Behind
from normprobe.checkpoints.digest import parts_in
from normprobe.checkpoints.dtypes import name_of
from normprobe.checkpoints.header import laid_out, read_header
from normprobe.checkpoints.opened import Opened
from normprobe.checkpoints.shard import ShardWriter, Told, read_back
from normprobe.checkpoints.weights import SAFE, SAFE_INDEX
from normprobe.errors import CheckpointError

WORTH_IT = 1 << 16  # bytes from which a tensor is mapped and not kept; a process may have some 65,000 mappings


@dataclass(frozen=True)
class Room:
    """What a tensor takes in a file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor, dtype: str | None = None) -> Room:
        """That of `tensor`; in a file whose dtype it keeps, of as many bytes."""
        return cls(dtype or name_of(tensor.dtype), tuple(tensor.shape), tensor.numel() * tensor.element_size())


Layout = Mapping[str, Mapping[str, Room]]  # the tensors of each file, in order


def same_layout(source: Opened) -> dict[str, dict[str, Room]]:
    """The files and tensors of a checkpoint as they are; pickles become files of safetensors."""
    return {
        file: {name: Room.of(source.tensors[name], source.dtypes[name]) for name in names}
        for file, names in source.layout.items()
    }


def sharded(rooms: Mapping[str, Room], most: int | None) -> dict[str, dict[str, Room]]:
    """The tensors in order, in files of at most `most` bytes; a larger tensor gets one to itself."""
    groups: list[dict[str, Room]] = [{}]
    size = 0
    for name, room in rooms.items():
        if most is not None and groups[-1] and size + room.nbytes > most:
            groups.append({})
            size = 0
        groups[-1][name] = room
        size += room.nbytes
    if len(groups) == 1:
        return {SAFE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


@final
class Output:
    """New weight files in `folder`.

    Args:
        folder: an empty folder that is nobody's yet.
        layout: which tensors each file gets; names that `source` has and nobody puts are copied from it.
        source: the checkpoint that is patched.
        told: is told of bytes that were written, and read back.
        reserved: whether the files take all their room now, and not in `finish`.

    Raises:
        OSError: the disk has no room for all of it.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        source: Opened,
        told: Told = lambda done: None,
        reserved: bool = True,
    ) -> None:
        self.folder, self.layout, self.source, self.told, self._reserved = folder, layout, source, told, reserved
        self._places = {name: file for file, rooms in layout.items() for name in rooms}
        self._writers: dict[str, ShardWriter] = {}
        self._behind: Behind[Tensor | None] = Behind()
        with ExitStack() as stack:  # where one file cannot be made, the others are let go of
            for file, rooms in layout.items():
                header = laid_out({n: (r.dtype, r.shape, r.nbytes) for n, r in rooms.items()}, source.metadata)
                writer = ShardWriter(folder / file, header, reserved)
                stack.callback(writer.close)
                self._writers[file] = writer
            stack.callback(self._behind.close)
            self._stack = stack.pop_all()

    def put(self, name: str, tensor: Tensor, then: Callable[[Tensor | None], object] = lambda mapped: None) -> None:
        """Write a tensor, again if need be, while the caller goes on.

        Args:
            name: in the file.
            tensor: its values, which stay as they are until `then` is called, or are put again.
            then: gets the same values mapped from the file, so that `tensor` need not be kept; None where they do not
                lie so that they could be. It is called in the caller's thread, at the next `put`, `settle` or `finish`.

        Raises:
            OSError: the disk refused this or the tensor before.
            CheckpointError: this or the tensor before is of another form than the file has room for.
        """
        self._behind.do(partial(self._put, name, tensor), then)

    def settle(self) -> None:
        """Wait until everything that was put is written.

        Raises:
            As `put`.
        """
        self._behind.settle()

    def _put(self, name: str, tensor: Tensor) -> Tensor | None:
        file = self._places[name]
        writer = self._writers[file]
        again = name in writer.sums
        writer.sums.pop(name, None)
        writer.put(name, tensor, (lambda done: None) if again else self.told)
        return self._mapping(file, name, tensor)

    def _mapping(self, file: str, name: str, tensor: Tensor) -> Tensor | None:
        """By a mapping of its own: in one that others are written to, a page shared with them would stay as it was."""
        header = self._writers[file].header
        entry = header.entries[name]
        start, end = header.range_of(entry)
        if entry.nbytes < WORTH_IT or start % tensor.element_size():
            return None
        mapped = torch.from_file(str(self.folder / file), shared=False, size=end, dtype=torch.uint8)
        return mapped[start:end].view(tensor.dtype).reshape(tensor.shape)

    def finish(self) -> dict[str, dict[str, str]]:
        """Copy what is missing, wait for the disk, read everything back, and write the index.

        Returns:
            The sum over every tensor of every file.

        Raises:
            CheckpointError: a tensor is neither put nor in the source, or reads back as something else.
            OSError: the disk has no room for what was not reserved.
        """
        self.settle()
        for writer in () if self._reserved else self._writers.values():
            writer.reserve()
        missing = {file: self._missing(file) for file in self.layout}
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1), "normprobe-write") as pool:
            found = {file: pool.submit(self._finished, writer, missing[file]) for file, writer in self._writers.items()}
            try:
                hashes = {file: each.result() for file, each in found.items()}
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        if set(self.layout) != {SAFE}:
            self._write_index()
        return hashes

    def close(self) -> None:
        """Let go of the files."""
        self._stack.close()

    def _missing(self, file: str) -> list[str]:
        """Every tensor of a file that nobody put."""
        missing = [name for name in self.layout[file] if name not in self._writers[file].sums]
        unknown = [name for name in missing if name not in self.source.tensors]
        if unknown:
            raise CheckpointError(f"no values for {unknown[0]}", expected="a tensor of the checkpoint, or a new one")
        return missing

    def _finished(self, writer: ShardWriter, missing: list[str]) -> dict[str, str]:
        """Copy what is missing from where it lies in the source; the sum over every tensor as the disk has it."""
        if self.source.safe:
            self._copy_bytes(writer, missing)
        else:
            for name in missing:
                writer.put(name, self.source.tensors[name], self.told)
        writer.finish()
        return read_back(writer, self.told)

    def _copy_bytes(self, writer: ShardWriter, names: list[str]) -> None:
        places = {name: path for path in self.source.files for name in self.source.layout[path.name]}
        for path in dict.fromkeys(places[name] for name in names):
            header = read_header(path)
            with path.open("rb", buffering=0) as stream:
                for name in (each for each in names if places[each] == path):
                    entry = header.entries[self.source.stored.get(name, name)]
                    writer.put_bytes(name, parts_in(stream, *header.range_of(entry)), self.told)

    def _write_index(self) -> None:
        rooms = [room for held in self.layout.values() for room in held.values()]
        metadata = {**(self.source.index or {}).get("metadata", {}), "total_size": sum(room.nbytes for room in rooms)}
        if "total_parameters" in metadata:
            metadata["total_parameters"] = sum(prod(room.shape) for room in rooms)
        index = {**(self.source.index or {}), "metadata": metadata, "weight_map": dict(sorted(self._places.items()))}
        (self.folder / SAFE_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
