"""Weight files of a checkpoint folder, checked before anything is built from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from normprobe.checkpoints.names import listed, plural
from normprobe.errors import CheckpointError

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
INDEXES = (SAFE_INDEX, PICKLE_INDEX)
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Weights:
    """The weight files of one folder; `safe` is False for pickles, `keys` is empty for them."""

    files: tuple[Path, ...]
    safe: bool
    keys: frozenset[str] = frozenset()


def find_weights(folder: Path, allow_pickle: bool) -> Weights | None:
    """The weights of `folder`, each safetensors file checked; None where there are none.

    Raises:
        CheckpointError: a file is truncated, has a corrupt header, is named in the index and missing, lies
            outside the folder, or is a pickle and pickles were not asked for.
    """
    if (folder / SAFE).is_file():
        return Weights((folder / SAFE,), True, read_keys(folder / SAFE))
    if (folder / SAFE_INDEX).is_file():
        return _sharded(folder / SAFE_INDEX)
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    if shards:
        raise CheckpointError(f"{folder}: shards without their index", expected=SAFE_INDEX, found=shards[0].name)
    for name in (PICKLE, PICKLE_INDEX):
        if (folder / name).is_file():
            return _pickled(folder / name, allow_pickle)
    return None


def read_keys(path: Path) -> frozenset[str]:
    """The names of the tensors in one safetensors file.

    Raises:
        CheckpointError: the file is not whole, or is no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as stream:
        head = stream.read(len(LFS_POINTER))
    if head == LFS_POINTER:
        raise CheckpointError(f"{path}: a Git LFS pointer, not the weights", hint="git lfs pull, then run this again")
    try:
        with safe_open(path, framework="pt") as tensors:
            return frozenset(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: cannot be read as safetensors",
            expected="a whole file: header length, JSON header, tensor data",
            found=f"{_cause(str(error))} ({path.stat().st_size:,} bytes: {error})",
            hint="download or save the file again",
        ) from error


def _cause(message: str) -> str:
    text = message.lower()
    if "incompletebuffer" in text or "not fully covered" in text or "toosmall" in text.replace(" ", ""):
        return "truncated, or longer than its header says"
    if "header" in text:
        return "corrupt header, or no safetensors file"
    return "unreadable"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: the file cannot be read, is not UTF-8 JSON, or holds something other than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read", expected="a JSON object", found=error.strerror) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: no valid JSON", expected="a JSON object", found=str(error)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: no JSON object", expected="an object", found=type(value).__name__)
    return value


def _sharded(index: Path) -> Weights:
    by_shard = _shards(index)
    files, keys = [], set[str]()
    for name, wanted in by_shard.items():
        path = index.parent / name
        if not path.is_file():
            raise CheckpointError(
                f"{index}: shard {name} is missing",
                expected=str(path),
                found=f"no such file, while the index places {plural(len(wanted), 'tensor')} there",
                hint="download the missing shard",
            )
        held = read_keys(path)
        absent = sorted(wanted - held)
        if absent:
            raise CheckpointError(
                f"{path}: lacks tensors that {index.name} places there",
                expected=listed(tuple(absent)),
                found=f"{len(held)} other tensors",
                hint="shards and index are of different versions: download both again",
            )
        files.append(path)
        keys |= held
    return Weights(tuple(files), True, frozenset(keys))


def shard_names(index: Path) -> tuple[str, ...]:
    """The files that `index` names, in its order.

    Raises:
        CheckpointError: the index names none, or one outside the folder.
    """
    return tuple(_shards(index))


def _shards(index: Path) -> dict[str, set[str]]:
    """Tensor names by shard, as the index gives them."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no shards named", expected="weight_map, an object of tensor: file")
    by_shard: dict[str, set[str]] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or not _inside(name, ".safetensors" if index.name == SAFE_INDEX else ".bin"):
            raise CheckpointError(
                f"{index}: {key} is placed outside the folder",
                expected="the name of a weight file beside the index",
                found=repr(name),
            )
        by_shard.setdefault(name, set()).add(key)
    return by_shard


def _inside(name: str, suffix: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    rooted = path.is_absolute() or name[1:2] == ":"
    return not rooted and ".." not in path.parts and path.suffix == suffix


def _pickled(path: Path, allow_pickle: bool) -> Weights:
    if not allow_pickle:
        raise CheckpointError(
            f"{path}: pickled weights are refused",
            expected=SAFE,
            found="a pickle, which can run code when it is read",
            hint="--allow-pickle reads its tensors alone; or save it again as safetensors",
        )
    return Weights((path,), False)
