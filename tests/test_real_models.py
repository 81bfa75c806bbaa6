"""Whole audits of two trained models, held against what is known of them, and what norms on queries and keys do to one.

Their files come inside installed packages; without these the tests are skipped.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import normprobe
from benchmarks import qk_norm
from normprobe import stats
from normprobe.cli.audit import examine
from normprobe.cli.options import DtypeChoice
from normprobe.cli.request import Request
from normprobe.records import StreamState
from normprobe.report.report import Report
from normprobe.rewrites import QKClip


def audit(target: Path) -> Report:
    """The report of `normprobe audit` on 512 tokens of the bundled text, in float32."""
    return examine(Request(str(target), tokens=512, dtype=DtypeChoice("float32"), quiet=True))


def block_outputs(report: Report) -> list[StreamState]:
    """The stream after the last write of each block, in order."""
    (measured,) = report.residual
    return list({state.block: state for state in measured.states}.values())


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> Report:
    return audit(smollm2_folder)


@pytest.fixture(scope="module")
def minilm(minilm_folder: Path) -> Report:
    return audit(minilm_folder)


def test_smollm2_is_read_as_what_it_is(smollm2: Report) -> None:
    assert smollm2.target.inputs == "bundled sample text, 512 tokens"
    assert smollm2.target.dtype == "float32"
    (stream,) = smollm2.anatomy.streams
    assert (stream.placement, stream.depth, stream.width, stream.parallel) == ("pre", 60, 576, False)
    assert stream.final_norm == "model.norm"
    assert [branch.kind for branch in stream.branches] == ["attention", "mlp"] * 30
    assert len({branch.block for branch in stream.branches}) == 30
    norms = smollm2.anatomy.norms
    assert len(norms) == 61
    assert {(n.kind, n.eps, n.eps_placement, n.dtype) for n in norms} == {("rmsnorm", 1e-5, "inside_sqrt", "float32")}
    sites = smollm2.anatomy.attention
    assert [(site.heads, site.kv_heads, site.head_dim, site.qk_norm) for site in sites] == [(9, 3, 64, None)] * 30
    assert smollm2.anatomy.head is not None
    assert smollm2.anatomy.head.tied_to == "model.embed_tokens.weight"


def test_smollm2_is_sound_and_has_massive_activations(smollm2: Report) -> None:
    assert {finding.severity.value for finding in smollm2.findings} == {"note"}
    assert "NP303" in [finding.code for finding in smollm2.findings]
    assert not smollm2.failed("warning")
    assert smollm2.measurements.output_finite is True


def test_smollm2_is_measured_everywhere(smollm2: Report) -> None:
    (measured,) = smollm2.residual
    assert len(measured.states) == 60
    assert len(smollm2.attention) == 30
    assert all(row.unasked for row in smollm2.skipped)


def test_smollm2_keeps_its_first_token_large(smollm2: Report) -> None:
    state = block_outputs(smollm2)[11]
    assert state.block == "model.layers.11"
    assert state.position == 0
    assert 900 <= state.rms_max <= 1100
    assert 5 <= state.rms_median <= 7
    (measured,) = smollm2.residual
    largest = max(measured.massive, key=lambda entry: abs(entry.value))
    assert largest == measured.massive[0]
    assert largest.position == 0
    assert largest.ratio > 1000


def test_smollm2_grows_with_depth(smollm2: Report) -> None:
    medians = [state.rms_median for state in block_outputs(smollm2)]
    assert len(medians) == 30
    assert 1.5 <= medians[0] <= 2.2
    assert 35 <= medians[-1] <= 42
    assert medians[-1] >= 15 * medians[0]
    assert 0.75 <= stats.growth(medians).exponent <= 0.95


def test_both_look_trained(smollm2: Report, minilm: Report) -> None:
    for report in (smollm2, minilm):
        init = report.measurements.init
        assert init is not None
        assert init.trained is True
        assert all(weight.recipes == () for weight in init.weights)


def test_minilm_is_read_as_what_it_is(minilm: Report) -> None:
    assert minilm.target.inputs == "bundled sample text, 512 tokens"
    (stream,) = minilm.anatomy.streams
    assert (stream.placement, stream.depth, stream.width) == ("post", 12, 384)
    assert (stream.final_norm, stream.needs_final_norm) == (None, False)
    assert len({branch.block for branch in stream.branches}) == 6
    norms = minilm.anatomy.norms
    assert len(norms) == 13
    assert {(n.kind, n.eps, n.eps_placement) for n in norms} == {("layernorm", 1e-12, "inside_sqrt")}
    assert stream.entry_norm in {n.path for n in norms if n.role == "embedding"}
    assert all(branch.post_norm for branch in stream.branches)


def test_minilm_is_sound_and_does_not_grow(minilm: Report) -> None:
    assert "NP201" not in [finding.code for finding in minilm.findings]
    assert not [row for row in minilm.skipped if row.what.startswith("NP201")]
    assert not minilm.failed("error")
    medians = [state.rms_median for state in block_outputs(minilm)]
    assert max(medians) < 3 * statistics.median(medians)


def test_minilm_on_the_command_line_prints_json_alone(minilm: Report, minilm_folder: Path, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "normprobe", "audit", str(minilm_folder), "--tokens", "512", "--format", "json"],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "normprobe-report/1"
    assert document["anatomy"] == json.loads(minilm.to_json())["anatomy"]
    assert [f["code"] for f in document["findings"]] == [f.code for f in minilm.findings]


@pytest.fixture(scope="module")
def weights(smollm2_loaded: Any) -> Any:
    """SmolLM2 in float32."""
    return smollm2_loaded.model


@pytest.fixture(scope="module")
def distilled(smollm2_loaded: Any) -> tuple[Any, Any, Any, Any]:
    """A copy with norms whose gains were fitted on the start of the text, its plan, that start, and the text's end."""
    fit, held_out = qk_norm.texts(64, 64, smollm2_loaded.tokenizer)
    model, plan, _ = qk_norm.normed(smollm2_loaded.model, "distilled", 8, fit)
    return model, plan, fit, held_out


def test_distilled_norms_on_queries_and_keys_stay_near_smollm2_on_other_text(weights: Any, distilled: Any) -> None:
    model, plan, _, held_out = distilled
    with torch.no_grad():
        wanted = weights(input_ids=held_out).logits.double().log_softmax(-1)
    assert 0.1 < qk_norm.outcome(model, wanted, held_out)["kl"] <= 0.8
    told = [line.removeprefix("now: ").split(": |logit| <= ") for line in str(plan).splitlines() if "|logit|" in line]
    bounds = {path: float(words.split(",")[0]) for path, words in told}
    found = qk_norm.largest(model, held_out)
    assert {path for path, _ in found} == bounds.keys()
    assert len(found) == 270
    shares = [value / bounds[path] for (path, _), value in found.items()]
    assert 0.25 < max(shares) <= 1


def test_smollm2_with_distilled_norms_trains_without_a_spike(distilled: Any) -> None:
    model, _, fit, _ = distilled
    losses = qk_norm.trained(copy.deepcopy(model), fit[:, :24], steps=6)
    assert len(losses) == 7
    assert all(after < 1.1 * before for before, after in itertools.pairwise(losses)), losses
    assert losses[-1] < losses[0] / 4


def test_clipped_heads_of_smollm2_come_to_the_limit_and_every_other_row_keeps_its_bits(smollm2_loaded: Any) -> None:
    weights, (_, ids) = smollm2_loaded.model, qk_norm.texts(64, 64, smollm2_loaded.tokenizer)
    model = copy.deepcopy(weights)
    before, limit = qk_norm.largest(model, ids), 12.0
    normprobe.plan(model, [QKClip(limit)], {"input_ids": ids}).apply()
    after = qk_norm.largest(model, ids)
    columns = {site.path: site.columns["q"] for site in normprobe.probe(model, {"input_ids": ids}).anatomy.attention}
    rest = {name: parameter.detach().clone() for name, parameter in weights.named_parameters()}
    moved = 0
    for (path, head), value in after.items():
        new, old = model.get_parameter(columns[path].parameter).detach(), rest[columns[path].parameter]
        ((start, stop),) = columns[path].heads[head]
        if torch.equal(new[start:stop], old[start:stop]):
            assert value <= limit
        else:
            assert before[path, head] > limit
            assert value == pytest.approx(limit, rel=1e-4)
            moved += 1
            old[start:stop] = new[start:stop]
    assert 10 < moved < 30
    assert all(torch.equal(parameter, rest[name]) for name, parameter in model.named_parameters())
