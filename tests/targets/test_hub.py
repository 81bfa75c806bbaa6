from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from normprobe.errors import TargetError
from normprobe.targets import resolve
from normprobe.targets.config import close_types
from tests.targets import checkpoints

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ASK = """
import json, sys
from normprobe.errors import TargetError
from normprobe.targets import TargetOptions, resolve

for name, options in json.loads(sys.argv[1]):
    try:
        loaded = resolve(name, TargetOptions(**options))
        state = {key: float(value.double().sum()) for key, value in loaded.model.state_dict().items()}
        answer = {"target": loaded.target.model_dump(), "notes": loaded.notes, "sums": state}
    except TargetError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
"""


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers `/REPO/resolve/REVISION/FILE` from a folder, as the hub does, and nothing else."""

    folder: Path

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):
            self._list()
            return
        content = self._answer()
        if content is not None:
            self.wfile.write(content)

    def _list(self) -> None:
        """A repository and its files, as `/api/models/REPO/revision/REVISION` and `…/tree/…` have them."""
        repo, kind = re.split("/(revision|tree)/", self.path.removeprefix("/api/models/"))[:2]
        files = [path for path in (self.folder / repo).rglob("*") if path.is_file()]
        names = [str(path.relative_to(self.folder / repo)) for path in files]
        info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
        sizes = [path.stat().st_size for path in files]
        tree = [{"type": "file", "path": n, "size": s, "oid": "0"} for n, s in zip(names, sizes, strict=True)]
        content = json.dumps(info if kind == "revision" else tree).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self) -> bytes | None:
        repo, _, rest = self.path.strip("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        path = self.folder / repo / file
        missing = (
            "RepoNotFound"
            if not (self.folder / repo).is_dir()
            else "RevisionNotFound"
            if revision not in ("main", COMMIT)
            else "EntryNotFound"
            if not path.is_file()
            else None
        )
        content = b"" if missing else path.read_bytes()
        self.send_response(404 if missing else 200)
        if missing:
            self.send_header("X-Error-Code", missing)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        return None if missing else content

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a stand-in hub and the folder of its repositories."""
    folder = tmp_path / "hub"
    folder.mkdir()
    handler = type("Hub", (_Hub,), {"folder": folder})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()
    thread.join()


def ask(
    home: Path, endpoint: str, offline: bool, *questions: tuple[str, dict[str, Any]], code: str = ASK
) -> list[dict[str, Any]]:
    """The answers of a fresh process that runs `code`, whose hub is `endpoint` and whose cache is in `home`."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline))}
    environment = {key: value for key, value in os.environ.items() if key != "TRANSFORMERS_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(questions)],
        env={**environment, **settings, "HF_HUB_DISABLE_XET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_stand_in_hub_then_cache_then_nothing(hub: tuple[str, Path], tmp_path: Path) -> None:
    endpoint, folder = hub
    one = checkpoints.gpt2(folder / "someone" / "tiny")
    checkpoints.tokenizer_file(folder / "someone" / "tiny")
    many = checkpoints.gpt2(folder / "someone" / "shards", shard="8KB")
    checkpoints.config_file(folder / "someone" / "bare")
    code = {"auto_map": {"AutoModel": "own.OwnModel"}}
    checkpoints.config_file(folder / "someone" / "code", **code)
    (folder / "someone" / "empty").mkdir()
    home = tmp_path / "home"
    tiny, shards, bare, config, code_error, empty, gone, revision = ask(
        home,
        endpoint,
        False,
        ("someone/tiny", {}),
        ("someone/shards", {"revision": COMMIT}),
        ("someone/bare", {}),
        ("someone/bare", {"config_only": True}),
        ("someone/code", {}),
        ("someone/empty", {}),
        ("someone/llama-gone", {}),
        ("someone/tiny", {"revision": "v9"}),
    )
    for answer, saved in ((tiny, one), (shards, many)):
        assert answer["sums"] == {key: float(v.double().sum()) for key, v in saved.state_dict().items()}
        assert (answer["target"]["source"], answer["target"]["revision"]) == ("hub", COMMIT)
    assert tiny["target"]["inputs"] == "bundled sample text, 32 tokens"
    assert "no weights in the hub repository" in bare["error"]
    assert "random weights (seed 0)" in config["notes"]
    assert "--trust-remote-code" in code_error["error"]
    assert "no config.json" in empty["error"]
    assert endpoint in gone["error"]
    assert "--config-only llama" in gone["error"]
    assert "no revision 'v9'" in revision["error"]

    dead = "http://127.0.0.1:9"
    cached, unknown, misspelt, nothing = ask(
        home,
        dead,
        False,
        ("someone/tiny", {}),
        ("gpt2", {}),
        ("lama", {"config_only": True}),
        ("zork", {"config_only": True}),
    )
    assert cached["sums"] == tiny["sums"]
    assert any("hub not reached" in note for note in cached["notes"])
    for part in (
        "no file or folder of that name",
        "not in the hub's local cache",
        dead,
        "--config-only gpt2",
    ):
        assert part in unknown["error"]

    assert "a local path, a model type of transformers or a repository" in misspelt["error"]
    assert "try: --config-only llama or " in misspelt["error"]
    assert "zork: not found" in nothing["error"]
    assert "no model type of transformers has a name like it; a target may be" in nothing["error"]
    for form in ("gpt2", "org/name", "config.json", ".gguf", "path/file.py:function"):
        assert form in nothing["error"].split("try:")[1]
    assert "--config-only" not in nothing["error"]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("lama", "llama"),
        ("GPT-2", "gpt2"),
        ("gptneox", "gpt_neox"),
        ("deepseek-v3", "deepseek_v3"),
        ("meta-llama/Llama-3-8B", "llama"),
        ("bert-base-uncased", "bert"),
        ("gpt_sw3", "gpt-sw3"),
    ],
)
def test_a_model_type_is_found_by_a_name_like_it(name: str, first: str) -> None:
    found = close_types(name)
    assert found[0] == first
    assert len(found) <= 3
    assert close_types("zork") == []


def test_offline_is_said() -> None:
    with pytest.raises(TargetError, match=r"(?s)someone/none: not found.*offline mode is on"):
        resolve("someone/none")
