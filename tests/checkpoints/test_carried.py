"""Files beside the weights come along, those behind links too."""

from __future__ import annotations

from pathlib import Path

from normprobe.checkpoints.carried import carry


def test_folders_behind_links_come_along_and_rings_end(tmp_path: Path) -> None:
    source, other, out = (tmp_path / name for name in ("source", "other", "out"))
    for folder in (source / "sub", other, out):
        folder.mkdir(parents=True)
    (other / "of mine.txt").write_text("here")
    (other / "old.safetensors").write_bytes(b"")
    (source / "linked").symlink_to(other)
    (source / "sub" / "ring").symlink_to(source)
    assert carry(source, out, frozenset()) == ("linked/old.safetensors",)
    assert [str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()] == ["linked/of mine.txt"]


def test_what_tools_keep_for_themselves_stays_behind(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    out.mkdir()
    for name in (".git/config", ".cache/huggingface/lock", "sub/.git/config", ".gitattributes"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("")
    assert carry(source, out, frozenset()) == ()
    assert [str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()] == [".gitattributes"]
