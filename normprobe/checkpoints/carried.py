"""The files of a checkpoint folder beside its weights: tokeniser, templates, configurations, licence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from normprobe.errors import CheckpointError

WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".tflite",
    ".mlmodel",
    ".pkl",
    ".npz",
    ".index.json",
)
HIDDEN = (".git", ".cache", ".locks")


def carry(source: Path, out: Path, made: frozenset[str]) -> tuple[str, ...]:
    """Copy every file of `source` to `out` that holds no weights and is not among those `made` already; links are
    followed.

    Returns:
        The files that stay behind, since they hold weights as they were before.
    """
    left = []
    for name in _files(source):
        if name.endswith(WEIGHTS):
            left.append(name)
        elif name not in made:
            place = out / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, place)
    return tuple(left)


def check_carried(source: Path) -> None:
    """Say before the work that a file could not come along.

    Raises:
        CheckpointError: one cannot be read, is a link to nothing, or is no file, such as a pipe.
    """
    for name in _files(source):
        path = source / name
        if name.endswith(WEIGHTS):
            continue
        if path.exists() and not path.is_file():
            hint = "move it out of the checkpoint: what lies beside the weights comes along"
            raise CheckpointError(f"{path} cannot be copied", expected="a file", found=_kind(path), hint=hint)
        if not os.access(path, os.R_OK):
            found = "no right to read it" if path.exists() else f"a link to {os.readlink(path)}, where nothing is"
            hint = "put it right, or remove it: what lies beside the weights comes along"
            raise CheckpointError(f"{path} cannot be copied", expected="a file", found=found, hint=hint)


def _kind(path: Path) -> str:
    """What is neither a file nor a folder."""
    return "a pipe" if path.is_fifo() else "a socket" if path.is_socket() else "a device"


def _files(folder: Path) -> Iterator[str]:
    """Paths of all files, relative to `folder`, in order; a folder that a link leads back to is not entered again."""
    entered = set[str]()
    for place, folders, names in os.walk(folder, followlinks=True):
        entered.add(os.path.realpath(place))
        inside = sorted(each for each in folders if each not in HIDDEN)
        folders[:] = [each for each in inside if os.path.realpath(os.path.join(place, each)) not in entered]
        for name in sorted(names):
            yield os.path.relpath(os.path.join(place, name), folder)
