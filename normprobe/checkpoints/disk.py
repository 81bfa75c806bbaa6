"""Room on a disk, looked for before it is used."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from normprobe.errors import CheckpointError


def check_free(folder: Path, what: str, needs: Mapping[str, int]) -> None:
    """Refuse what the disk of `folder` has no room for.

    Args:
        folder: it exists.
        what: what cannot be done then, and where.
        needs: bytes by what they are for.

    Raises:
        CheckpointError: they are more than are free.
    """
    free, total = shutil.disk_usage(folder).free, sum(needs.values())
    if free < total:
        told = ", ".join(f"{size:,} for {why}" for why, size in needs.items() if size)
        hint = "make room, or name a place on another disk"
        raise CheckpointError(what, expected=f"{total:,} bytes: {told}", found=f"{free:,} bytes free", hint=hint)
