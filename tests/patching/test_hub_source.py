"""A repository of the hub is fetched whole, but for weights in other formats, and patched."""

from __future__ import annotations

from pathlib import Path

from normprobe.patching.manifest import read_manifest
from tests.patching.checkpoints import llama, saved
from tests.targets.test_hub import COMMIT, ask, hub

__all__ = ["hub"]  # the fixture

PATCH = """
import json, sys
from pathlib import Path
from normprobe.errors import NormprobeError
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.rewrites import FoldGains
from normprobe.targets import TargetOptions

for name, options in json.loads(sys.argv[1]):
    out = Path(options.pop("out"))
    try:
        patch(name, out, [FoldGains()], PatchOptions(level=None, target=TargetOptions(**options)))
        answer = {"files": sorted(path.name for path in out.rglob("*") if path.is_file())}
    except NormprobeError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
"""


def test_a_repository_is_patched_online_and_from_the_cache(hub: tuple[str, Path], tmp_path: Path) -> None:
    endpoint, folder = hub
    saved(llama(), folder / "someone" / "tiny")
    (folder / "someone" / "tiny" / "pytorch_model.bin").write_bytes(b"never fetched")
    outs = [tmp_path / name for name in ("first", "second", "third")]
    first, gone = ask(
        tmp_path / "home",
        endpoint,
        False,
        ("someone/tiny", {"out": str(outs[0])}),
        ("someone/none", {"out": str(outs[1])}),
        code=PATCH,
    )
    assert "files" in first, first
    assert {"chat_template.jinja", "LICENSE", "notes.txt", "model.safetensors"} <= set(first["files"])
    manifest = read_manifest(outs[0])
    assert (manifest.source.name, manifest.source.revision, manifest.left_out) == ("someone/tiny", COMMIT, ())
    assert "someone/none: not found" in gone["error"]
    assert "hf auth login" in gone["error"]
    assert "--config-only" not in gone["error"]
    cached = ask(tmp_path / "home", "http://127.0.0.1:9", True, ("someone/tiny", {"out": str(outs[2])}), code=PATCH)
    assert cached[0]["files"] == first["files"]
