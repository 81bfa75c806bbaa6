"""`normprobe patch OUT --verify`: a manifest that cannot be read is damage, no manifest is no patch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_patch import Run, run, source

__all__ = ["run", "source"]  # the fixtures


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "normprobe.json: no valid JSON"),
        ("[]", "normprobe.json: no JSON object"),
        ("{}", "normprobe.json is no manifest that normprobe"),
        ('{"schema_": "other"}', "found: 'other'"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_not_as_it_was_written(
    run: Run, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "normprobe.json").write_text(text)
    found = run(tmp_path, "--verify")
    assert (found.exit_code, found.stderr) == (1, "")
    assert said in found.stdout
    assert found.stdout.endswith(f"{tmp_path}: 1 problem; nothing else can be told without its manifest\n")
    data = run(tmp_path, "--verify", "--format", "json")
    assert (data.exit_code, said in json.loads(data.stdout)["problems"][0]) == (1, True)


def test_what_another_version_wrote_cannot_be_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "normprobe.json").write_text('{"schema_": "normprobe-patch/2", "versions": {"normprobe": "9.1"}}')
    found = run(tmp_path, "--verify")
    assert (found.exit_code, "normprobe 9.1 wrote it" in found.stderr) == (2, True)


def test_a_folder_that_is_no_patch_cannot_be_told(run: Run, source: Path) -> None:
    found = run(source, "--verify")
    assert (found.exit_code, "no normprobe.json" in found.stderr) == (2, True)
