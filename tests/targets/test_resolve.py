from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normprobe.errors import SettingError, TargetError
from normprobe.targets import TargetOptions, resolve


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_pickle_by_itself_is_refused_unread(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    torch.save({"x": torch.ones(1)}, path)
    with pytest.raises(TargetError, match=r"(?s)a pickle by itself is refused.*weights_only=True"):
        resolve(str(path))


def test_weights_alone_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(TargetError, match="do not say what model"):
        resolve(str(path))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")
    with pytest.raises(TargetError, match=r"(?s)not a kind of file.*\.onnx"):
        resolve(str(path))


@pytest.mark.parametrize("name", ["./gone", "/no/such/folder", "gone.gguf", "a/b/c", "with space", "x.json"])
def test_names_that_are_nothing(name: str) -> None:
    with pytest.raises(TargetError, match=r"no such file or folder|not found|no config\.json"):
        resolve(name)


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_current_folder(name: str) -> None:
    with pytest.raises(TargetError, match="no target is named"):
        resolve(name)


def test_a_revision_is_for_hub_ids(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--revision has no effect: the target is no hub id"):
        resolve(str(tmp_path), TargetOptions(revision="main"))
