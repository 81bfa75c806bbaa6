"""Runs `trial` in subprocesses, so that a model that hangs or kills the interpreter loses itself alone."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

ROOT = Path(__file__).resolve().parent.parent
BATCH = 25  # models that share one interpreter
BUILDING = ("start", "build")
TRIAL = (sys.executable, "-m", "benchmarks.trial")


class Named(Protocol):
    """What a worker is asked: a dataclass of texts, one of which names it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """In answers and tables."""


class Worker:
    """One subprocess of `trial`, or of another command that answers as it does."""

    def __init__(self, command: Sequence[str] = TRIAL) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environment["TRANSFORMERS_VERBOSITY"] = "error"
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self._pending = b""
        self.served = 0

    def ask(self, entry: Named, limit: float) -> dict[str, Any]:
        """The outcome of one model; on a time limit or a death the worker is of no further use (`served` is BATCH)."""
        self.served += 1
        assert self._process.stdin is not None
        stage, end = "start", time.monotonic() + limit
        try:
            self._process.stdin.write(json.dumps(asdict(entry)).encode() + b"\n")
            self._process.stdin.flush()
            while True:
                answer = self._line(end)
                if answer is None:
                    return self._lost(entry, stage, f"time limit of {limit:.0f} s", kill=True)
                if "outcome" in answer:
                    return answer
                stage = answer["stage"]
        except (EOFError, BrokenPipeError):
            return self._lost(entry, stage, self._death())

    def close(self) -> None:
        """End the subprocess."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with suppress(BrokenPipeError):  # an entry that the process did not live to read
                if stream is not None:
                    stream.close()

    def _lost(self, entry: Named, stage: str, reason: str, kill: bool = False) -> dict[str, Any]:
        self.served = BATCH
        if kill:
            self._process.kill()
        outcome = "not built" if stage in BUILDING else "crashed"
        return {"name": entry.name, "outcome": outcome, "note": f"{reason} in stage {stage}", "shrink": 0}

    def _death(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}: {last}"
        return f"the interpreter ended ({name})"

    def _line(self, end: float) -> dict[str, Any] | None:
        """The next answer; None when the time is up."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = end - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    raise EOFError
                self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found


def outcomes(
    entries: Sequence[Named], limit: float, workers: int, command: Sequence[str] = TRIAL
) -> Iterator[dict[str, Any]]:
    """The outcome of each entry, as they come: in order within a batch."""
    batches = [entries[i : i + BATCH] for i in range(0, len(entries), BATCH)]
    with ThreadPoolExecutor(workers) as threads:
        if workers == 1:
            for batch in batches:
                yield from _batch(batch, limit, command)
        else:
            for results in threads.map(lambda batch: list(_batch(batch, limit, command)), batches):
                yield from results


def _batch(entries: Sequence[Named], limit: float, command: Sequence[str]) -> Iterator[dict[str, Any]]:
    worker: Worker | None = None
    try:
        for entry in entries:
            if worker is None or worker.served >= BATCH:
                if worker is not None:
                    worker.close()
                worker = Worker(command)
            yield worker.ask(entry, limit)
    finally:
        if worker is not None:
            worker.close()
