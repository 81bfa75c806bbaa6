"""Faults of the stream planted in small models through their Anatomy, and found by a probe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import normprobe
from normprobe.records import Finding, Stream
from tests.models import Built, decoder, gpt2, llama, olmo2, opt, torch_encoder

Build = Callable[[], Built]


def pre_decoder() -> Built:
    return decoder("pre")


def pre_opt() -> Built:
    return opt(before=True)


def encoder() -> Built:
    return torch_encoder(norm_first=True, final=True)


BUILDS: list[Build] = [pre_decoder, gpt2, llama, pre_opt]


def stream_of(built: Built) -> Stream:
    return normprobe.probe(*built, level="structure").anatomy.streams[0]


@torch.no_grad()
def scale(model: nn.Module, parameters: Iterable[str], factor: float) -> None:
    for path in dict.fromkeys(parameters):
        model.get_parameter(path).mul_(factor)


def found(built: Built, code: str, **options: Any) -> Finding | None:
    """The finding with this code, which is the first of its severity."""
    findings = normprobe.probe(*built, **options).findings
    mine = [f for f in findings if f.code == code]
    if mine:
        assert next(f for f in findings if f.severity == mine[0].severity).code == code
    return mine[0] if mine else None


@pytest.mark.parametrize("build", [*BUILDS, olmo2])
@pytest.mark.parametrize("kind", ["attention", "mlp"])
def test_a_zeroed_branch(build: Build, kind: str) -> None:
    built = build()
    branch = [b for b in stream_of(built).branches if b.kind == kind][-1]
    scale(built[0], branch.writers, 0.0)
    finding = found(built, "NP305")
    assert finding is not None
    assert finding.where == branch.path
    assert f"this {kind} branch adds nothing" in finding.message


@pytest.mark.parametrize("build", [pre_decoder, encoder, llama])
def test_a_loud_branch(build: Build) -> None:
    built = build()
    branch = [b for b in stream_of(built).branches if b.kind == "mlp"][-1]
    scale(built[0], branch.writers, 300.0)
    finding = found(built, "NP306")
    assert finding is not None
    assert finding.where == branch.path


@pytest.mark.parametrize("build", BUILDS)
def test_writers_that_are_far_too_small(build: Build) -> None:
    built = build()
    stream = stream_of(built)
    scale(built[0], (path for branch in stream.branches for path in branch.writers), 1e-6)
    finding = found(built, "NP302")
    assert finding is not None
    assert finding.message.startswith(f"{stream.depth} of {stream.depth} writes")


@pytest.mark.parametrize("build", BUILDS)
def test_writes_that_half_precision_loses(build: Build) -> None:
    model, inputs = build()
    report = normprobe.probe(model, inputs)
    for state, branch in zip(report.residual[0].states, report.anatomy.streams[0].branches, strict=True):
        scale(model, branch.writers, 1e-3 / state.write_share)
    finding = found((model.bfloat16(), inputs), "NP307")
    assert finding is not None
    assert finding.severity.value == "warning"
    assert finding.message.startswith("rounding the sum to bfloat16 changes it by")
    wide = found((model.float(), inputs), "NP307")
    assert wide is None or wide.severity.value == "note"


@pytest.mark.parametrize("build", [pre_decoder, gpt2, pre_opt])
def test_biases_that_make_all_tokens_one(build: Build) -> None:
    built = build()
    model = built[0]
    for branch in stream_of(built).branches:
        for path in branch.writers:
            parameter = model.get_parameter(path)
            if parameter.dim() == 1:
                torch.nn.init.constant_(parameter, 100.0)
                parameter.data[::2] *= -1  # layer norms subtract what all features share
    codes = [f.code for f in normprobe.probe(*built).findings if f.severity.value == "warning"]
    assert codes[-1] == "NP308"
    if len(stream_of(built).branches) > 4:  # of four aligned writes the sum is twice that of independent ones, no more
        assert "NP301" in codes


def test_a_deep_stack_grows_by_a_factor_without_norms_alone() -> None:
    finding = found(decoder("none", layers=12), "NP301")
    assert finding is not None
    assert "over the second half of 12 blocks" in finding.message
    assert found(decoder("pre", layers=12), "NP301") is None


@pytest.mark.parametrize("build", [*BUILDS, olmo2, encoder])
def test_sound_models_raise_none_of_them(build: Build) -> None:
    codes = {f.code for f in normprobe.probe(*build()).findings}
    assert not codes & {"NP301", "NP302", "NP305", "NP306", "NP308"}
