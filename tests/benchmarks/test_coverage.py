"""Trials, subprocesses, table and page of the coverage benchmark."""

from __future__ import annotations

import sys
from dataclasses import asdict

import pytest
import torch
from torch import nn

from benchmarks import pool, trial
from benchmarks.registry import KINDS, Entry, registered
from benchmarks.table import page, table

GPT2 = Entry("causal-lm", "gpt2", "GPT2LMHeadModel")


def row(name: str, outcome: str, note: str = "") -> dict[str, object]:
    return {"name": name, "outcome": outcome, "note": note, "shrink": 0}


RESULTS = [
    row("causal-lm:a:A", "audited"),
    row("causal-lm:b:B", "crashed", "IndexError: a|b <c>"),
    row("causal-lm:c:C", "not built", "missing library"),
    row("masked-lm:d:D", "audited", "no stream"),
]


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_has_models_once_each_in_order(kind: str) -> None:
    entries = registered(kind)
    assert len(entries) > 20
    assert entries == sorted(set(entries))


def test_a_known_model_is_audited() -> None:
    stages: list[str] = []
    outcome = trial.attempt(GPT2, stages.append)
    assert (outcome.outcome, outcome.note, outcome.shrink) == ("audited", "", 0)
    assert stages == ["build", "probe", "check"]


def test_a_crash_of_the_probe_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise IndexError("planted")

    monkeypatch.setattr("normprobe.probing.read", broken)
    outcome = trial.attempt(GPT2, lambda stage: None)
    assert outcome.outcome == "crashed"
    assert outcome.note.startswith("IndexError: planted at normprobe/probing.py:")


def test_wrong_readers_make_a_model_unsound(monkeypatch: pytest.MonkeyPatch) -> None:
    from normprobe.anatomy.streams import streams

    real = streams.read_stream

    def swapped(*args: object, **kwargs: object) -> object:
        found = real(*args, **kwargs)  # type: ignore[arg-type]
        branches = tuple(
            b.model_copy(update={"writers": b.readers, "readers": b.writers}) for b in found.record.branches
        )
        object.__setattr__(found, "record", found.record.model_copy(update={"branches": branches}))
        return found

    monkeypatch.setattr("normprobe.anatomy.build.read_stream", swapped)
    outcome = trial.attempt(GPT2, lambda stage: None)
    assert outcome.outcome == "unsound"
    assert "with its writers zeroed its readers still move the output" in outcome.note


def test_a_missing_class_is_not_built() -> None:
    outcome = trial.attempt(Entry("causal-lm", "gpt2", "NoSuchClass"), lambda stage: None)
    assert outcome.outcome == "not built"
    assert "NoSuchClass" in outcome.note


def test_unset_zero_and_tiny_parameters_get_seeded_values() -> None:
    model = nn.ParameterList([torch.zeros(9), torch.full((9,), torch.nan), torch.full((9,), 1e-6), torch.ones(9)])
    trial.settle(model)
    values = [p.detach() for p in model]
    assert all(v.isfinite().all() and v.std() > 0.01 for v in values[:3])
    assert values[3].equal(torch.ones(9))


def test_a_time_limit_ends_one_model_alone() -> None:
    entries = [GPT2, Entry("causal-lm", "gpt2", "NoSuchClass")]
    first, second = pool.outcomes(entries, limit=0.01, workers=1)
    assert first["outcome"] == "not built"
    assert "time limit" in first["note"]
    assert second["name"] == entries[1].name


def test_a_death_while_probing_is_a_crash() -> None:
    program = 'import os; input(); print(\'{"stage": "probe"}\', flush=True); os.abort()'
    worker = pool.Worker((sys.executable, "-c", program))
    found = worker.ask(GPT2, limit=60)
    worker.close()
    assert found["outcome"] == "crashed"
    assert found["note"] == "the interpreter ended (SIGABRT) in stage probe"
    assert worker.served == pool.BATCH


def test_a_worker_answers_with_the_outcome() -> None:
    (found,) = pool.outcomes([Entry("causal-lm", "gpt2", "NoSuchClass")], limit=60, workers=1)
    assert found["outcome"] == "not built"
    assert set(found) == set(asdict(trial.Outcome("", "")))


def test_shares_are_of_those_that_run() -> None:
    lines = table(RESULTS)
    assert lines[2] == "| causal-lm | 3 | 2 | 1 | 0 | 0 | 1 | 50.0 % |"
    assert lines[-1] == "| all | 4 | 3 | 2 | 0 | 0 | 1 | 66.7 % |"


def test_the_page_lists_what_is_not_audited_and_why() -> None:
    text = page(RESULTS, "5.0")
    assert "- `B` (causal-lm, b): IndexError: a/b &lt;c>" in text
    assert text.index("## Crashed") < text.index("## Not built") < text.index("## Audited, with a remark")
    assert "`A`" not in text
