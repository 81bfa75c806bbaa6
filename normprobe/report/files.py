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
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise NormprobeError(
            f"cannot write to `{path}`", expected="a file name", found="a folder", hint="add a file name"
        )
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
        else:
            _replace(target, text)
    except OSError as error:
        raise NormprobeError(
            f"cannot write to `{path}`",
            expected="an existing folder with room and permission",
            found=error.strerror or str(error),
            hint="another path",
        ) from error


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
