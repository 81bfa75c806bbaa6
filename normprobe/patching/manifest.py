"""What a patched checkpoint says of itself, in the file `normprobe.json` beside its weights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Literal

from pydantic import ValidationError

from normprobe.checkpoints.digest import digest, digest_of
from normprobe.checkpoints.header import read_header
from normprobe.checkpoints.staging import LAST
from normprobe.checkpoints.weights import read_json
from normprobe.errors import CheckpointError
from normprobe.records.base import Record
from normprobe.rewrites import Proof
from normprobe.version import __version__

NAME = LAST
SCHEMA: Literal["normprobe-patch/1"] = "normprobe-patch/1"


class Source(Record):
    """The checkpoint that was patched.

    Attributes:
        name: as it was given.
        revision: commit of a hub repository; None for a folder.
        xxh3_128: of its weight files, one after the other.
    """

    name: str
    revision: str | None = None
    xxh3_128: str


class Step(Record):
    """One rewrite.

    Attributes:
        rewrite: its name and settings, seeds included, as `normprobe.rewrites.load` takes them.
        effect: exact | calibrated | breaking.
        sites: places that it changed.
        refused: places that needed it and could not have it, and why.
    """

    rewrite: dict[str, Any]
    effect: str
    sites: int
    refused: dict[str, str]


class Became(Record):
    """The other architecture that the rewritten model was written as.

    Attributes:
        model_type: as configurations name it.
        proof: its outputs beside those of the rewritten model.
        dropped: what the configuration said and the new one has no place for.
    """

    model_type: str
    proof: Proof
    dropped: dict[str, Any]

    def __str__(self) -> str:
        fields = ", ".join(f"{name} {value}" for name, value in self.dropped.items())
        without = f"; without {fields}" if fields else ""
        return f"as {self.model_type}: {self.proof}{without}"


class Manifest(Record):
    """All that is known of a patched checkpoint.

    Attributes:
        schema_: version of this record.
        versions: of normprobe, torch, transformers and Python.
        source: what was patched.
        steps: the rewrites in order.
        inputs: what the proof and the measured values stand on.
        proof: what the rewrites did to the outputs; None where there are no outputs to compare.
        became: what it was written as; None for the architecture that it was.
        loads: "plain": any program that knows the architecture; "code": by one of the ways that need its changes.
        left_out: files of the source that hold weights as they were before, by their `stated_path`.
        tensors: XXH3 (128 bits) of the values of every tensor, by file.
        headers: that of what each of these files says before them: names, dtypes, shapes and places.
        files: that of every other file, by its `stated_path`.
    """

    schema_: Literal["normprobe-patch/1"] = SCHEMA
    versions: dict[str, str]
    source: Source
    steps: tuple[Step, ...]
    inputs: str
    proof: Proof | None
    became: Became | None = None
    loads: Literal["plain", "code"]
    left_out: tuple[str, ...] = ()
    tensors: dict[str, dict[str, str]]
    headers: dict[str, str]
    files: dict[str, str]


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`.

    Raises:
        CheckpointError: there is none, or none that this version reads.
    """
    path = folder / NAME
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {NAME}", expected="a folder that normprobe patch wrote")
    fields = read_json(path)
    try:
        return Manifest.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise _unread(path, fields, error) from error


def of_another_version(path: Path) -> bool:
    """Whether a file says that it is a manifest of another form, as a later normprobe may write."""
    try:
        stated = read_json(path).get("schema_", SCHEMA)
    except CheckpointError:
        return False
    return stated != SCHEMA and re.fullmatch(r"normprobe-patch/\d+", str(stated)) is not None


def _unread(path: Path, fields: Mapping[str, Any], error: ValidationError) -> CheckpointError:
    """That it is none that this version reads, and which version wrote it if it says so."""
    versions, stated = fields.get("versions"), fields.get("schema_", SCHEMA)
    by = versions.get("normprobe") if isinstance(versions, dict) else None
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    found = f"{stated!r:.80}" if stated != SCHEMA else f"{place}: {first['msg'].lower()}"
    return CheckpointError(
        f"{path} is no manifest that normprobe {__version__} reads",
        expected=SCHEMA,
        found=found + (f"; normprobe {by} wrote it" if by else ""),
        hint="patch the source again" + (f", or check it with normprobe {by}" if by not in (None, __version__) else ""),
    )


def stated_path(path: PurePath) -> str:
    """A path as text that JSON holds and no other path has: bytes that are no UTF-8 are `\\xff`, a backslash is two."""
    return os.fsencode(path.as_posix().replace("\\", "\\\\")).decode("utf-8", "backslashreplace")


def hashes_of(folder: Path, but: Mapping[str, Any]) -> dict[str, str]:
    """XXH3 of every file in `folder` except those named and the manifest, by `stated_path` in the folder."""
    found, others = {}, {*but, NAME}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = path.relative_to(folder)
        if name.as_posix() not in others:
            found[stated_path(name)] = digest_of(path)
    return found


def header_hash(path: Path) -> str:
    """XXH3 of the header of a weight file."""
    with path.open("rb") as stream:
        return digest(stream.read(read_header(path).size)).hexdigest()
