"""What would end a run late or oddly is refused before, by what it is."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from normprobe.checkpoints.carried import check_carried
from normprobe.checkpoints.staging import part_of, recover, staged
from normprobe.errors import CheckpointError, NormprobeError, TargetError
from normprobe.patching.manifest import read_manifest
from normprobe.patching.scratch import Scratch
from normprobe.patching.source import opened_subject
from normprobe.targets import TargetOptions
from normprobe.targets.config import read_config
from normprobe.version import __version__


def test_a_link_to_nothing_is_found_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "optimizer.pt").symlink_to("nowhere")  # stays behind anyway
    check_carried(tmp_path)
    (tmp_path / "LICENSE").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"LICENSE cannot be copied(.|\n)*a link to nowhere, where nothing is"):
        check_carried(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are none on this system")
def test_a_pipe_and_a_socket_are_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path has to be short
    with socket.socket(socket.AF_UNIX) as made:
        os.mkfifo("queue.bin")  # stays behind anyway
        check_carried(tmp_path)
        made.bind("served")
        with pytest.raises(CheckpointError, match=r"served cannot be copied(.|\n)*a socket(.|\n)*move it out"):
            check_carried(tmp_path)
    os.mkfifo("queue")
    with pytest.raises(CheckpointError, match=r"queue cannot be copied(.|\n)*found: a pipe"):
        check_carried(tmp_path)


def test_a_name_too_long_for_the_hidden_ones_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"n: too long a name(.|\n)*room for \.NAME\.normprobe-backup beside"):
        recover(tmp_path / ("n" * 240))


def test_a_missing_configuration_is_told(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"config\.json is missing(.|\n)*copy it"):
        read_config(tmp_path / "config.json", TargetOptions())
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read(.|\n)*found: \w"):
        read_config(tmp_path / "config.json", TargetOptions())


def test_an_adapter_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with (
        pytest.raises(CheckpointError, match=r"is an adapter(.|\n)*merge it first"),
        opened_subject(str(tmp_path), TargetOptions(), Scratch(tmp_path)),
    ):
        pytest.fail("it was opened")


def test_a_run_that_began_at_the_same_instant_is_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    part_of(out).mkdir()
    with pytest.raises(CheckpointError, match="is being made by another run"), staged(out, overwrite=False):
        pytest.fail("it was made")
    assert part_of(out).is_dir()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no valid JSON"),
        ("[]", "no JSON object"),
        (
            "{}",
            f"no manifest that normprobe {__version__} reads(.|\n)*found: versions: field required$(.|\n)*try: patch",
        ),
        (json.dumps({"schema_": "normprobe-patch/2", "versions": {"normprobe": "9.1"}}), "/2'; normprobe 9.1 wrote it"),
    ],
)
def test_what_is_no_manifest_is_told_in_one_message(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "normprobe.json").write_text(text)
    with pytest.raises(NormprobeError, match=f"(?m){said}") as raised:
        read_manifest(tmp_path)
    assert "pydantic" not in str(raised.value)
