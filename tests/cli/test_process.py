"""The command as a process of its own: imports, streams and exit codes as a shell sees them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parents[2]
TARGET = """
import os
from torch import nn, randn

print("printed at import")

def build():
    print("printed by the factory")
    os.write(1, b"written past Python")
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), randn(2, 8)
"""


def start(*arguments: str, stdout: int | IO[bytes] = subprocess.PIPE, **variables: str) -> subprocess.Popen[bytes]:
    """A process with buffered output, as a user has it; `variables` are added to its environment."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment = inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen([sys.executable, *arguments], stdout=stdout, stderr=subprocess.PIPE, env=environment)


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, (out or b"").decode(), err.decode()


@pytest.mark.parametrize("words", [["--help"], ["audit", "--help"], ["rules"], ["explain", "201"], ["--version"]])
def test_what_needs_no_model_loads_no_torch(words: list[str]) -> None:
    code, out, err = finish(start("-X", "importtime", "-m", "normprobe", *words))
    assert code == 0
    assert out
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in err.splitlines()}
    assert "typer" in loaded
    assert not loaded & {"torch", "transformers", "numpy"}


def test_a_reader_that_leaves_early_is_no_error() -> None:
    process = start("-m", "normprobe", "rules", "--format", "json")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read().decode()
    process.stderr.close()
    assert (process.wait(120), err) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_behind_stdout_is_said() -> None:
    with open("/dev/full", "wb") as full:
        code, _, err = finish(start("-m", "normprobe", "rules", stdout=full))
    assert code == 2
    assert err.startswith("error: cannot write to standard output\n  found: No space left on device")
    assert "Traceback" not in err


def test_an_ascii_stream_gets_ascii() -> None:
    code, out, _ = finish(start("-m", "normprobe", "rules", PYTHONIOENCODING="ascii"))
    assert code == 0
    assert out.isascii()


def test_json_stays_pure_whatever_the_target_prints(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(TARGET)
    words = ("audit", f"{tmp_path / 'net.py'}:build", "--format", "json", "--level", "structure")
    code, out, err = finish(start("-m", "normprobe", *words))
    assert code in (0, 1), err
    document = json.loads(out)
    assert document["target"]["class"] == "Sequential"
    assert "written past Python" in err


def test_the_demo_finds_its_fault() -> None:
    code, out, err = finish(start("-m", "normprobe", "demo", "--format", "json"))
    assert code == 0, err
    assert "NP201" in {finding["code"] for finding in json.loads(out)["findings"]}


SLOW = """
import signal, sys, time
from normprobe.cli.app import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has its children ignore it

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            try:
                print("importing", file=sys.stderr, flush=True)
                time.sleep(60)
            except BaseException:
                pass  # as some libraries do while they are imported

sys.meta_path.insert(0, Slow())
sys.argv = ["normprobe", "audit", "normprobe.demo.model:build"]
main()
"""


@pytest.mark.parametrize("name", ["typer", "torch"])
def test_an_interrupt_while_libraries_load_ends_the_command(name: str) -> None:
    process = start("-c", SLOW.format(name=name))
    assert process.stderr is not None
    assert process.stderr.readline().strip() == b"importing"
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, out, err) == (130, "", "interrupted\n")
