from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normprobe.errors import TargetError
from normprobe.targets import resolve


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


@pytest.mark.parametrize("name", ["./gone", "/no/such/folder", "gone.gguf", "a/b/c", "with space", "", "x.json"])
def test_names_that_are_nothing(name: str) -> None:
    with pytest.raises(TargetError, match=r"no such file or folder|not found|no config\.json"):
        resolve(name)
