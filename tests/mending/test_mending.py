"""Findings are mended as far as allowed, and nothing is ever made worse."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import normprobe
from normprobe.checks.placement.missing_final_norm import MissingFinalNorm
from normprobe.errors import RewriteError, SettingError
from normprobe.mending import mend, plan, rewrite
from normprobe.records import Anatomy, Fix
from normprobe.rewrites import AddFinalNorm, Effect, Site, UpcastNorms
from normprobe.rewrites.base import module_at
from tests.models import RMSNorm, decoder, gpt2, llama
from tests.rewrites.cases import Inline, narrow_decoder, snapshot


def codes(report: normprobe.Report) -> list[str]:
    return [finding.code for finding in report.findings]


def test_what_is_allowed_is_mended_and_the_rest_is_left_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = narrow_decoder(final=False)
    before = snapshot(model)
    done = mend(model, inputs)
    assert (codes(done.before), codes(done.after)) == (["NP201", "NP106"], ["NP201"])
    assert [each.why for each in done.left] == [
        f"AddFinalNorm is breaking ({Effect.BREAKING.meaning}); allowed: exact",
    ]
    more = mend(model, inputs, report=done.after, allow="breaking")
    assert more.before is done.after
    assert codes(more.after) == []
    assert more.left == ()
    more.undo()
    done.undo()
    assert snapshot(model) == before


def test_the_settings_of_the_report_are_those_of_the_probes_after_it() -> None:
    model, inputs = narrow_decoder(final=False)
    settings = normprobe.Settings(ignore=("NP201",))
    before = normprobe.probe(model, inputs, settings=settings)
    assert codes(before) == ["NP106"]
    done = mend(model, inputs, report=before, allow="breaking")
    assert [one.name for one, _ in done.applied[0].steps] == ["UpcastNorms"]
    assert (len(done.applied), codes(done.after), done.after.data.settings) == (1, [], settings)


def test_a_sound_model_is_left_alone() -> None:
    model, inputs = llama()
    before = snapshot(model)
    done = mend(model, inputs, allow="breaking")
    assert done.after is done.before
    assert done.applied == ()
    assert snapshot(model) == before


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_the_model_is_probed_again_as_the_report_was_made(
    monkeypatch: pytest.MonkeyPatch, autocast: str | None
) -> None:
    model, inputs = narrow_decoder()
    report = normprobe.probe(model, inputs, autocast=autocast)
    seen = []

    def spy(*args: Any, **more: Any) -> normprobe.Report:
        seen.append(more)
        return normprobe.probe(*args, **more)

    monkeypatch.setattr("normprobe.mending.probed.probe", spy)
    done = mend(model, inputs, report=report)
    assert [each["autocast"] for each in seen] == [autocast]
    assert done.after.target.autocast == autocast


@dataclass(frozen=True)
class Harmful(UpcastNorms):
    """Upcasts the norms, and moves their eps out of the root."""

    name = "UpcastNorms"
    usual = Effect.BREAKING

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        super().change(model, site, undo)
        module = module_at(model, site.path)
        undo.callback(setattr, module, "placement", module.placement)
        module.placement = "outside_sqrt"


def test_what_raises_another_finding_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normprobe.mending.attempt.load", lambda values: Harmful())
    model, inputs = narrow_decoder()
    before = snapshot(model)
    done = mend(model, inputs, allow="breaking")
    assert snapshot(model) == before
    assert done.after is done.before
    (left,) = done.left
    assert "applied and taken back: it raised NP101" in left.why


@dataclass(frozen=True)
class Idle(UpcastNorms):
    """Finds its sites and does nothing to them."""

    name = "UpcastNorms"

    def change(self, model: nn.Module, site: Site, undo: ExitStack) -> None:
        module_at(model, site.path).note = "visited"
        undo.callback(delattr, module_at(model, site.path), "note")

    def confirm(self, sites: tuple[Site, ...], anatomy: Anatomy) -> None:
        return


def test_what_mends_nothing_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normprobe.mending.attempt.load", lambda values: Idle())
    model, inputs = narrow_decoder()
    before = snapshot(model)
    done = mend(model, inputs)
    assert snapshot(model) == before
    assert [each.why for each in done.left] == [
        "UpcastNorms was applied and taken back: it mended none of its findings"
    ]


def test_a_norm_that_is_written_out_has_no_mend() -> None:
    done = mend(Inline().bfloat16(), torch.randn(2, 4, 32).bfloat16())
    (left,) = [each for each in done.left if each.finding.code == "NP106"]
    assert left.why == "no rewrite mends it; `normprobe explain NP106` says what to do"


def test_a_mend_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MissingFinalNorm, "fixes", (Fix(rewrite="PolishNorms"),))
    done = mend(*decoder("pre", final=False))
    assert [each.why for each in done.left] == ["its mend PolishNorms does not exist"]


def test_settings_are_checked() -> None:
    model, inputs = llama()
    with pytest.raises(SettingError, match=r"unknown effect 'all'\n  expected: exact \| calibrated \| breaking"):
        mend(model, inputs, allow="all")
    other, others = gpt2()
    with pytest.raises(SettingError, match="the report is of another model"):
        mend(model, inputs, report=normprobe.probe(other, others, level="structure"))


def test_inputs_are_made_where_the_config_says_enough() -> None:
    model, _ = llama()
    model.model.norm = nn.Identity()
    assert plan(model, [AddFinalNorm()]).state == "planned"
    done = rewrite(model, [AddFinalNorm(expect=1)])
    assert done.proof is not None
    assert done.proof.tokens == 32
    with pytest.raises(RewriteError, match="found: 0 sites"):
        rewrite(model, [AddFinalNorm(expect=1)])


def mixed(**eps: float) -> tuple[nn.Module, Any]:
    """A decoder whose norms have an eps of their own at some places."""
    model, inputs = decoder("pre", layers=6)
    for name, value in eps.items():
        model.get_submodule(name.replace("_", ".")).eps = value
    return model, inputs


def test_findings_of_one_code_are_mended_each_at_its_places() -> None:
    model, inputs = mixed(blocks_1_mix_norm=1e-3, blocks_4_mix_norm=1e-8)
    done = mend(model, inputs, allow="breaking")
    assert {(f.code, f.where) for f in done.before.findings} >= {
        ("NP105", "blocks.1.mix.norm"),
        ("NP105", "blocks.4.mix.norm"),
    }
    assert done.left == ()
    (step,) = [one for one in done.mended if "NP105" in {f.code for f in one.findings}]
    assert [site.path for _, found in step.plan.steps for site in found.sites] == [
        "blocks.1.mix.norm",
        "blocks.4.mix.norm",
    ]
    assert "mended by SetEps, 2 sites, breaking:" in str(done)


def test_a_milder_bound_is_said_with_the_call_that_goes_further() -> None:
    done = mend(*mixed(blocks_1_mix_norm=1e-3))
    assert done.mended == ()
    assert "SetEps is breaking" in str(done)
    assert 'normprobe.rewrite(model, [normprobe.SetEps(eps=1e-05, only="blocks.1.mix.norm")])' in str(done)


def test_what_an_optimiser_showed_is_not_taken_for_mended_without_it() -> None:
    model, inputs = narrow_decoder()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    report = normprobe.probe(model, inputs, optimizer=optimizer)
    assert {"NP106", "NP114"} <= set(codes(report))
    done = mend(model, inputs, report=report)
    assert [one.why for one in done.left if one.finding.code == "NP114"] == [
        "not looked at again: no optimiser was given: pass optimizer= to normprobe.probe"
    ]
    done.undo()
    again = mend(model, inputs, report=report, optimizer=optimizer)
    assert [(one.finding.code, one.why) for one in again.left] == [
        ("NP114", "no rewrite mends it; `normprobe explain NP114` says what to do")
    ]
    assert "normprobe.decay_groups makes groups that spare them" in again.left[0].finding.message


def test_a_place_where_the_settings_are_silent_is_left_as_it_is() -> None:
    model, inputs = mixed(blocks_1_mix_norm=1e-3, blocks_4_mix_norm=1e-8)
    settings = normprobe.Settings(per_path_ignores={"blocks.4*": ("NP105",)})
    report = normprobe.probe(model, inputs, settings=settings)
    done = mend(model, inputs, report=report, allow="breaking")
    assert done.left == ()
    assert (model.get_submodule("blocks.1.mix.norm").eps, model.get_submodule("blocks.4.mix.norm").eps) == (1e-5, 1e-8)


def test_what_another_mend_makes_possible_is_tried_again() -> None:
    """AddFinalNorm needs the eps of the stream's norms inside the root, which SetEps brings later."""
    model, inputs = decoder("pre", final=False, norm=lambda: RMSNorm(outside=True))
    done = mend(model, inputs, allow="breaking")
    assert {"NP101", "NP201"} <= set(codes(done.before))
    assert [rewrite.name for one in done.mended for rewrite, _ in one.plan.steps] == ["SetEps", "AddFinalNorm"]
    assert "NP201" not in codes(done.after)


def test_a_norm_that_never_runs_goes_where_only_what_is_exact_is_allowed() -> None:
    model, inputs = gpt2()
    model.transformer.h[0].extra = nn.LayerNorm(32)
    done = mend(model, inputs)
    assert [(one.plan.effect, [f.code for f in one.findings]) for one in done.mended] == [(Effect.EXACT, ["NP208"])]
