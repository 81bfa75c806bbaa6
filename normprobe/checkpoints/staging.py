"""A folder that appears whole or not at all.

It is filled under a hidden name beside its place, flushed to the disk, then renamed. Where it takes the place of
another folder, that one is renamed to a hidden backup first and removed last; a mark beside it, written before, says
which folder takes its place. Whatever moment the process dies at, `recover` finds what it left by these names, puts the
backup back where the new folder never came in, and removes it where the one that the mark means did.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normprobe.checkpoints.digest import digest_of
from normprobe.errors import CheckpointError

try:
    import fcntl

    LOCKS = True
except ImportError:
    LOCKS = False  # this system has none: a run that goes on is not told from a leftover


LAST = "normprobe.json"  # the file that a folder gets last, by which it is known as the one that moved in


def named(out: Path) -> Path:
    """`out` by a name of its own, beside which there is place for others; `.` and `..` have none.

    Raises:
        CheckpointError: it is the root of the disk.
    """
    found = Path(os.path.realpath(out)) if out.name in ("", "..") else out
    if not found.name:
        raise CheckpointError(f"{found} cannot be OUT", expected="a folder in another", hint="name a new folder")
    return found


def part_of(out: Path) -> Path:
    """Where the folder `out` is filled."""
    return out.with_name(f".{out.name}.normprobe-part")


def backup_of(out: Path) -> Path:
    """Where the folder that `out` replaces waits until the new one is in."""
    return out.with_name(f".{out.name}.normprobe-backup")


def mark_of(out: Path) -> Path:
    """The file that says, while there is a backup, which folder replaces it: the sum over its last file."""
    return out.with_name(f".{out.name}.normprobe-moving")


def check_place(out: Path, source: Path | None, *, overwrite: bool) -> None:
    """Say before the work that `out` cannot be made.

    Args:
        out: the new folder.
        source: the folder that is read, which stays.
        overwrite: whether `out` may take the place of a folder.

    Raises:
        CheckpointError: it exists and may not be replaced, is a link, is no folder, is the source, lies in it or holds
            it, or its parent is missing or cannot be written to.
    """
    if out.is_symlink():
        why = f"{out} is a link to {os.readlink(out)}"
        raise CheckpointError(why, expected="a place of its own", hint="name the folder itself")
    real = Path(os.path.realpath(out))
    if source is not None:
        _check_apart(real, Path(os.path.realpath(source)), out)
    if out.exists():
        if not out.is_dir():
            raise CheckpointError(f"{out} is a file", expected="a new folder", hint="another name")
        if not overwrite:
            raise CheckpointError(f"{out} exists", expected="a new folder", hint="another name, or --overwrite")
    if not real.parent.is_dir():
        hint = f"mkdir -p {out.parent}"
        raise CheckpointError(f"{out} cannot be made: no folder {out.parent}", expected="an existing parent", hint=hint)
    if not os.access(real.parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{out} cannot be made: {out.parent} is read-only", hint="another place, or its rights")


def _check_apart(out: Path, source: Path, named: Path) -> None:
    if not source.is_dir():
        return  # one file, which a new folder beside it leaves alone
    folder = source
    if out == folder:
        raise CheckpointError(f"{named} is the checkpoint itself", expected="another folder", hint="another name")
    if folder in out.parents or out in folder.parents:
        what = "lies in the checkpoint" if folder in out.parents else "holds the checkpoint"
        raise CheckpointError(f"{named} {what} ({folder})", expected="a folder beside it", hint="another name")


def recover(out: Path) -> tuple[str, ...]:
    """Put right what a run that was killed left beside `out`, and say what that was.

    Raises:
        CheckpointError: another run that still goes on is filling it, somebody else took its place, its name
            is too long, or the system refuses.
    """
    try:
        return tuple(_put_right(out))
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            expected = f"one with room for {backup_of(Path('NAME'))} beside it"
            raise CheckpointError(f"{out}: too long a name", expected=expected, hint="a shorter name") from error
        what = f"what a run that was stopped left beside {out} cannot be put right"
        raise CheckpointError(what, found=_said(error, out), hint=f"ls -la {out.parent}") from error


def _put_right(out: Path) -> Iterator[str]:
    part, backup = part_of(out), backup_of(out)
    if part.is_dir():
        with _locked(part, out):
            shutil.rmtree(part)
        yield f"removed {part}, the unfinished folder of a run that was stopped"
    if backup.is_dir() and out.exists():
        if not _replaced(out):
            what = f"{out} was made by somebody else while {backup} waited to come back to its place"
            raise CheckpointError(what, expected="one of them", hint="move one of them away, then run this again")
        shutil.rmtree(backup)
        yield f"removed {backup}: the folder that replaced it is in place"
    elif backup.is_dir():
        backup.rename(out)
        yield f"moved {backup} back to {out}: a run was stopped before its new folder was in place"
    if mark_of(out).is_file():  # of no more use, nor worth a word
        mark_of(out).unlink()


def _replaced(out: Path) -> bool:
    """Whether `out` is the folder that the backup made way for."""
    mark, last = mark_of(out), out / LAST
    return mark.is_file() and last.is_file() and mark.read_bytes() == digest_of(last).encode()


@contextmanager
def staged(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to fill, which becomes `out` at the end of the block; after an error there is nothing left of it.

    Raises:
        CheckpointError: the disk is full or refuses, somebody else made `out` meanwhile, or it is in place and what it
            replaced cannot be removed.
    """
    part = part_of(out)
    try:
        _make(part, out)
        with _locked(part, out):
            try:
                yield part
                _flush(part)
                _move_in(part, out, overwrite=overwrite)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
    except OSError as error:
        raise refusal(out, error) from error


def _make(part: Path, out: Path) -> None:
    try:
        part.mkdir()
    except FileExistsError as error:  # made since `recover` looked
        raise CheckpointError(f"{out} is being made by another run", hint="wait for it, or another name") from error


def refusal(out: Path, error: OSError) -> CheckpointError:
    """What the system said, as an error about `out`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "make room, or name a place on another disk" if full else "another place"
    what = "the disk is full" if full else _said(error, out)
    return CheckpointError(f"{out} was not made, nothing is left of it", found=what, hint=hint)


def _said(error: OSError, out: Path) -> str:
    return f"{error.strerror or error} ({error.filename or out})"


def _move_in(part: Path, out: Path, *, overwrite: bool) -> None:
    replaced = out.exists()
    if replaced and not overwrite:
        raise CheckpointError(f"{out} was made by somebody else meanwhile", hint="another name, or --overwrite")
    backup = backup_of(out)
    if replaced:
        _put_aside(out, part)
    try:
        part.rename(out)
    except BaseException:
        if replaced:
            backup.rename(out)
            mark_of(out).unlink()
        raise
    try:
        _flush_folder(out.parent)
        if replaced:
            shutil.rmtree(backup)
            mark_of(out).unlink(missing_ok=True)
    except OSError as error:
        kept = f"{backup}, which it replaced, is not removed" if replaced else "the disk has not said so"
        raise CheckpointError(f"{out} is whole and in place, but {kept}", found=_said(error, out)) from error


def _put_aside(out: Path, part: Path) -> None:
    """Make `out` the backup, once the disk has the mark that says that `part` takes its place."""
    mark, last = mark_of(out), part / LAST
    try:
        with mark.open("wb") as stream:
            stream.write(digest_of(last).encode() if last.is_file() else b"")
            stream.flush()
            os.fsync(stream.fileno())
        _flush_folder(out.parent)
        out.rename(backup_of(out))
    except BaseException:
        mark.unlink(missing_ok=True)
        raise


def _flush(folder: Path) -> None:
    """Wait until the disk has every file of `folder`, and the folders themselves."""
    for place, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(place, name), "rb") as stream:
                os.fsync(stream.fileno())
        _flush_folder(Path(place))


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return  # elsewhere a folder cannot be opened
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(part: Path, out: Path) -> Iterator[None]:
    """Hold the lock on `part` that tells a run that goes on from one that was killed."""
    if not LOCKS:
        yield
        return
    descriptor = os.open(part, os.O_RDONLY)
    try:
        _lock(descriptor, part, out)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, part: Path, out: Path) -> None:
    busy = CheckpointError(f"{out} is being made by another run", hint="wait for it, or another name")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise busy from error
    if not os.path.samestat(os.fstat(descriptor), os.stat(part)):
        raise busy  # it removed this one and made its own before the lock was taken
