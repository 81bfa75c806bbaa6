"""A folder appears whole or not at all, whatever happens while it is filled."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from normprobe.checkpoints import staging
from normprobe.checkpoints.digest import digest_of
from normprobe.checkpoints.staging import backup_of, check_place, mark_of, part_of, recover, staged
from normprobe.errors import CheckpointError


def filled(folder: Path, text: str = "new") -> None:
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    (folder / "sub" / "a.txt").write_text(text)


def whole(folder: Path) -> None:
    filled(folder)
    (folder / staging.LAST).write_text("{}")


def fill_and(folder: Path, error: BaseException) -> None:
    filled(folder)
    raise error


def text_of(folder: Path) -> str:
    return (folder / "sub" / "a.txt").read_text()


def test_the_folder_is_there_at_the_end_and_not_before(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staged(out, overwrite=False) as part:
        filled(part)
        assert not out.exists()
    assert text_of(out) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)])
def test_nothing_is_left_after_an_error(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), staged(tmp_path / "out", overwrite=False) as part:
        fill_and(part, error)
    assert list(tmp_path.iterdir()) == []


def test_the_old_folder_stays_after_an_error(tmp_path: Path) -> None:
    out = tmp_path / "out"
    filled(out, "old")
    with pytest.raises(ValueError, match="no"), staged(out, overwrite=True) as part:
        fill_and(part, ValueError("no"))
    assert text_of(out) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_old_folder_goes_when_the_new_one_is_in(tmp_path: Path) -> None:
    out = tmp_path / "out"
    filled(out, "old")
    (out / "more").write_text("of the old one")
    with staged(out, overwrite=True) as part:
        filled(part)
        assert text_of(out) == "old"
    assert sorted(path.name for path in out.iterdir()) == ["sub"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_somebody_made_meanwhile_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="somebody else"), staged(out, overwrite=False):
        filled(out, "theirs")
    assert text_of(out) == "theirs"
    assert not part_of(out).exists()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="the disk is full"), staged(out, overwrite=False):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out))
    assert list(tmp_path.iterdir()) == []


def test_the_old_folder_comes_back_when_the_new_one_cannot_move_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = tmp_path / "out", Path.rename
    filled(out, "old")

    def refusing(self: Path, target: Path) -> Path:
        if self == part_of(out):
            raise PermissionError(errno.EACCES, "no", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(CheckpointError, match="was not made"), staged(out, overwrite=True) as part:
        filled(part)
    assert text_of(out) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_run_left_is_removed_and_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    filled(part_of(out))
    assert any(str(part_of(out)) in line for line in recover(out))
    assert list(tmp_path.iterdir()) == []
    assert recover(out) == ()


def test_killed_between_the_moves_the_old_folder_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    filled(backup_of(out), "old")
    filled(part_of(out))
    told = recover(out)
    assert any("back to" in line for line in told)
    assert text_of(out) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_after_the_moves_the_backup_goes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    filled(backup_of(out), "old")
    whole(out)
    mark_of(out).write_text(digest_of(out / staging.LAST))
    assert any("removed" in line for line in recover(out))
    assert text_of(out) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_somebody_made_in_the_place_of_the_old_one_costs_neither(tmp_path: Path) -> None:
    out = tmp_path / "out"
    filled(backup_of(out), "old")
    filled(out, "theirs")
    for mark, last in ((None, None), ("", None), (None, "{}"), ("", "{}"), ("0" * 32, "{}")):
        for place, text in ((mark_of(out), mark), (out / staging.LAST, last)):
            place.unlink(missing_ok=True)
            if text is not None:
                place.write_text(text)
        with pytest.raises(CheckpointError, match=r"made by somebody else while .*normprobe-backup waited"):
            recover(out)
        assert (text_of(out), text_of(backup_of(out))) == ("theirs", "old")


@pytest.mark.parametrize("backup", [False, True])
def test_what_is_left_of_a_replacement_that_is_over_means_no_other_folder(tmp_path: Path, backup: bool) -> None:
    """Killed before the old folder was moved, or after it was removed or came back, the mark is all that is left."""
    out = tmp_path / "out"
    filled(backup_of(out) if backup else out, "old")
    mark_of(out).write_text("0" * 32)
    assert len(recover(out)) == backup
    assert text_of(out) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif(not staging.LOCKS, reason="this system has no file locks")
def test_a_run_that_goes_on_is_no_leftover(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staged(out, overwrite=False) as part:
        filled(part)
        with pytest.raises(CheckpointError, match="by another run"):
            recover(out)
        with pytest.raises(CheckpointError), staged(out, overwrite=False):
            pass
        assert text_of(part) == "new"
    assert text_of(out) == "new"


def test_places_that_cannot_be_are_refused(tmp_path: Path) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    filled(source)
    filled(other)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(other)
    (tmp_path / "same").symlink_to(source)

    def said(out: Path, overwrite: bool = True) -> str:
        with pytest.raises(CheckpointError) as caught:
            check_place(out, source, overwrite=overwrite)
        return str(caught.value)

    assert "is the checkpoint itself" in said(source)
    assert "is the checkpoint itself" in said(tmp_path / "other" / ".." / "source")
    assert "lies in the checkpoint" in said(source / "out")
    assert "holds the checkpoint" in said(tmp_path)
    assert "is a link to" in said(tmp_path / "link")
    assert "is a file" in said(tmp_path / "file")
    assert "--overwrite" in said(other, overwrite=False)
    assert "mkdir -p" in said(tmp_path / "no" / "out")
    check_place(tmp_path / "out", source, overwrite=False)
    check_place(other, source, overwrite=True)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="everything can be written to")
def test_a_read_only_parent_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(CheckpointError, match="read-only"):
            check_place(tmp_path / "out", None, overwrite=False)
    finally:
        tmp_path.chmod(0o755)


def test_a_parent_that_goes_away_is_named(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    with pytest.raises(CheckpointError, match="was not made"), staged(parent / "out", overwrite=False):
        shutil.rmtree(parent)


def test_what_it_replaced_and_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    filled(out, "old")

    def refusing(path: Path, **options: object) -> None:
        if path == backup_of(out):
            raise PermissionError(errno.EACCES, "no", str(path))

    monkeypatch.setattr(shutil, "rmtree", refusing)
    with (
        pytest.raises(CheckpointError, match=r"out is whole and in place, but .*normprobe-backup"),
        staged(out, overwrite=True) as part,
    ):
        whole(part)
    assert text_of(out) == "new"
    with pytest.raises(CheckpointError, match=r"(?s)beside .*out cannot be put right.*normprobe-backup"):
        recover(out)


@pytest.mark.skipif(not staging.LOCKS, reason="this system has no file locks")
def test_a_lock_on_a_folder_that_was_removed_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run cleans the leftover up, and makes its own, between the look at it and the lock."""
    out, flock = tmp_path / "out", staging.fcntl.flock
    filled(part_of(out), "left")

    def late(descriptor: int, how: int) -> None:
        part_of(out).rename(tmp_path / "removed")
        filled(part_of(out), "theirs")
        flock(descriptor, how)

    monkeypatch.setattr(staging.fcntl, "flock", late)
    with pytest.raises(CheckpointError, match="by another run"):
        recover(out)
    assert text_of(part_of(out)) == "theirs"
