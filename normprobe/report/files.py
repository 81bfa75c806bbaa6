"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from normprobe.errors import NormprobeError


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` (UTF-8) so that `path` is either the old file or the whole new one at every moment.

    A temporary file beside `path` is written, flushed to disk and moved over it. A link is followed, so that
    the file it points to is replaced and the link stays; a pipe or a device (`/dev/stdout`) is written to
    directly.

    Args:
        path: the file; its folder must exist.
        text: the content.

    Raises:
        NormprobeError: the folder does not exist, `path` is a folder, or the disk refused.
    """
    check_place(path)
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
        else:
            _replace(target, text)
    except OSError as error:
        found = error.strerror or str(error)
        raise _refusal(path, "a disk that takes the file", found, "another path") from error


def check_place(path: str | os.PathLike[str]) -> None:
    """Says before a long run that `write_whole` could not write to `path` after it.

    Raises:
        NormprobeError: `path` is a folder, or its folder does not exist or cannot be written to.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise _refusal(path, "a file name", "a folder", "add a file name")
    if not target.parent.is_dir():
        raise _refusal(path, "an existing folder", f"no folder `{target.parent}`", f"mkdir -p {target.parent}")
    written_to = target if target.exists() and not target.is_file() else target.parent
    if not os.access(written_to, os.W_OK):
        raise _refusal(path, "permission to write", f"none for `{written_to}`", "another path")


def _refusal(path: str | os.PathLike[str], expected: str, found: str, hint: str) -> NormprobeError:
    return NormprobeError(f"cannot write to `{path}`", expected=expected, found=found, hint=hint)


def _replace(target: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, _mode(target))
        os.replace(name, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _mode(target: Path) -> int:
    """Permissions for the new file: those of the file it replaces, else what the umask leaves of 0o666."""
    if target.exists():
        return target.stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
