"""Is a patched checkpoint still what was written?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from normprobe.checkpoints.header import read_header
from normprobe.checkpoints.names import plural, shown
from normprobe.checkpoints.shard import sums_in
from normprobe.checkpoints.staging import named, recover
from normprobe.checkpoints.weights import read_keys
from normprobe.errors import CheckpointError, NormprobeError
from normprobe.patching.manifest import NAME, Manifest, hashes_of, header_hash, of_another_version, read_manifest

Tell = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Verified:
    """What was found.

    Attributes:
        told: what a run that was stopped had left, and what became of it.
        problems: what is not as it was written.
        summary: both in a line.
    """

    told: tuple[str, ...]
    problems: tuple[str, ...]
    summary: str


def verify(folder: Path, tell: Tell | None = None) -> Verified:
    """Hold every tensor and file of `folder` against its manifest; the leftover of a stopped run is put right first.

    Raises:
        CheckpointError: there is no manifest, or one that another version of normprobe reads.
    """
    told = recover(named(folder))
    manifest = _manifest(folder)
    if isinstance(manifest, str):
        return Verified(told, (manifest,), f"{folder}: 1 problem; nothing else can be told without its manifest")
    problems = (*_files(folder, manifest), *_weights(folder, manifest, tell or (lambda stage, done, total: None)))
    tensors = sum(map(len, manifest.tensors.values()))
    as_it_was = f"{folder}: {plural(tensors, 'tensor')} in {plural(len(manifest.tensors), 'file')}, as written"
    count = len(problems)
    summary = f"{folder}: {plural(count, 'problem')}" if problems else as_it_was
    return Verified(told, problems, summary)


def _manifest(folder: Path) -> Manifest | str:
    """That of a folder, or what has become of it."""
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        path = folder / NAME
        if not path.is_file() or of_another_version(path):
            raise
        return str(error)


def _files(folder: Path, manifest: Manifest) -> Iterator[str]:
    found = hashes_of(folder, manifest.tensors)
    for name, value in manifest.files.items():
        if name not in found:
            yield f"{shown(name)}: missing"
        elif found[name] != value:
            yield f"{shown(name)}: changed since"
    for name in found.keys() - manifest.files.keys():
        yield f"{shown(name)}: added since"


def _weights(folder: Path, manifest: Manifest, tell: Tell) -> Iterator[str]:
    paths = [folder / name for name in manifest.tensors]
    total, done = sum(path.stat().st_size for path in paths if path.is_file()), 0
    for path, expected in zip(paths, manifest.tensors.values(), strict=True):
        if not path.is_file():
            yield f"{path.name}: missing"
            continue
        try:
            read_keys(path)
            found = sums_in(path, read_header(path))
        except NormprobeError as error:
            yield str(error)
            continue
        for name in sorted(expected.keys() | found.keys()):
            if found.get(name) != expected.get(name):
                what = "missing" if name not in found else "added since" if name not in expected else "other values"
                yield f"{path.name}: {shown(name)}: {what}"
        if header_hash(path) != manifest.headers.get(path.name):
            yield f"{path.name}: other names, dtypes, shapes or places in its header"
        done += path.stat().st_size
        tell("verify", done, total)
