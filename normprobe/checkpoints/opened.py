"""The weights of a checkpoint folder, mapped from the disk: reading them takes address space, not memory."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from normprobe.checkpoints.digest import digest, parts_in
from normprobe.checkpoints.dtypes import name_of
from normprobe.checkpoints.header import read_header
from normprobe.checkpoints.weights import INDEXES, SAFE, Weights, find_weights, read_json, shard_names
from normprobe.errors import CheckpointError


@dataclass(frozen=True)
class Opened:
    """Weights that are open.

    Attributes:
        folder: where they lie.
        files: their files.
        tensors: every tensor by its name; its values may be written to, which changes no file.
        layout: the names of each file, in the order of their values.
        dtypes: the dtype of each tensor as safetensors names it.
        metadata: texts of the first file, such as {"format": "pt"}.
        index: what the index of shards says; None where there is one file.
        safe: False for a pickle.
        stored: for names that are not those in the files: the name there.
    """

    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, Tensor]
    layout: Mapping[str, tuple[str, ...]]
    dtypes: Mapping[str, str]
    metadata: Mapping[str, str] = field(default_factory=dict)
    index: Mapping[str, Any] | None = None
    safe: bool = True
    stored: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def renamed(self, names: Mapping[str, str]) -> Opened:
        """The same with the tensors of `names` alone: for each new name the old one."""
        fresh = {old: new for new, old in names.items()}
        return replace(
            self,
            tensors={new: self.tensors[old] for new, old in names.items()},
            layout={file: tuple(fresh[old] for old in held if old in fresh) for file, held in self.layout.items()},
            dtypes={new: self.dtypes[old] for new, old in names.items()},
            stored={new: self.stored.get(old, old) for new, old in names.items()},
        )


@contextmanager
def opened(folder: Path, *, allow_pickle: bool = False) -> Iterator[Opened]:
    """The weights of `folder`, open until the end of the block.

    Raises:
        CheckpointError: a file is broken, missing, outside the folder, or a refused pickle; there are no weights, or a
            tensor is named twice.
    """
    found = find_weights(folder, allow_pickle)
    if found is None:
        names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8])
        raise CheckpointError(f"{folder}: no weights to patch", expected="model.safetensors", found=names or "nothing")
    below = [str(path) for path in found.files if path.parent != folder]
    if below:
        raise CheckpointError(f"{folder}: weights in a folder below", expected="beside the index", found=below[0])
    with ExitStack() as stack:
        yield _safe(folder, found, stack) if found.safe else _pickled(folder, found)


def _safe(folder: Path, found: Weights, stack: ExitStack) -> Opened:
    headers = {path: read_header(path) for path in found.files}
    _check_once({path: header.entries for path, header in headers.items()})
    tensors: dict[str, Tensor] = {}
    for path, header in headers.items():
        handle = stack.enter_context(safe_open(path, framework="pt"))
        tensors |= {name: handle.get_tensor(name) for name in header.entries}
    return Opened(
        folder=folder,
        files=found.files,
        tensors=tensors,
        layout={path.name: tuple(header.entries) for path, header in headers.items()},
        dtypes={name: entry.dtype for header in headers.values() for name, entry in header.entries.items()},
        metadata=headers[found.files[0]].metadata,
        index=_index(folder),
    )


def _check_once(held: Mapping[Path, Iterable[str]]) -> None:
    """No tensor may lie in two shards: which of them is meant?"""
    where: dict[str, Path] = {}
    for path, names in held.items():
        for name in names:
            if name in where:
                found = f"{where[name].name} and {path.name}"
                hint = "shards of different versions: download or save them again"
                raise CheckpointError(f"{path.parent}: {name} is in two shards", found=found, hint=hint)
            where[name] = path


def _index(folder: Path) -> Mapping[str, Any] | None:
    path = next((folder / name for name in INDEXES if (folder / name).is_file()), None)
    return None if path is None else read_json(path)


def _pickled(folder: Path, found: Weights) -> Opened:
    """The tensors of pickles, which are read as tensors alone; each file becomes one of safetensors."""
    path = found.files[0]
    files = tuple(folder / name for name in shard_names(path)) if path.suffix == ".json" else found.files
    held = {file: _tensors(file) for file in files}
    _check_once(held)
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    layout = dict(zip(names if len(files) > 1 else [SAFE], map(tuple, held.values()), strict=True))
    tensors = {name: tensor for each in held.values() for name, tensor in each.items()}
    dtypes = {name: name_of(tensor.dtype) for name, tensor in tensors.items()}
    return Opened(folder, files, tensors, layout, dtypes, {"format": "pt"}, _index(folder), safe=False)


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError) as error:
        expected = "a file of tensors that torch.save wrote, in the format of torch 1.6 or later"
        raise CheckpointError(f"{path}: cannot be read", expected=expected, found=str(error)) from error
    if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
        raise CheckpointError(f"{path}: no state dict", expected="tensors by name", found=type(values).__name__)
    return values


@contextmanager
def hashing(opened: Opened) -> Iterator[Future[str]]:
    """The sum over the weight files, in order, beside the work of the block; given up where the block ends before."""
    over = Event()
    with ThreadPoolExecutor(1, "normprobe-hash") as pool:
        try:
            yield pool.submit(_hash, opened.files, over)
        finally:
            over.set()


def _hash(files: Sequence[Path], over: Event) -> str:
    total = digest()
    for path in files:
        with path.open("rb", buffering=0) as stream:
            for part in parts_in(stream, 0, path.stat().st_size):
                if over.is_set():
                    return ""
                total.update(part)
    return total.hexdigest()
