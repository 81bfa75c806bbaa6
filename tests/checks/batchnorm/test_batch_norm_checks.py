"""The checks of batch norms on records: NP701 to NP706."""

from __future__ import annotations

import math
from typing import Any

import pytest

from normprobe.checks import find, run
from normprobe.records import Basis, Finding, Skipped
from normprobe.records.batchnorm import BatchNormMeasure, BatchNormSite
from normprobe.records.init import Initialisation
from tests.checks import builders as b

DRAWN = {True: 0.1, None: 0.7, False: 1.0}  # share of the weights that fit a distribution


def init(trained: bool | None, drawn: float | None = None) -> Initialisation:
    share = DRAWN[trained] if drawn is None else drawn
    return Initialisation(trained=trained, drawn=share, evidence=(), writes=(), roles=(), weights=())


def judge(code: str, found: BatchNormMeasure, **more: Any) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    return run(b.document(batchnorm=found, **more), [find(code)])


def one(code: str, site: BatchNormSite, trained: bool | None = None, **more: Any) -> Finding:
    (finding,), _ = judge(code, b.batchnorm(site, **more), init=init(trained))
    return finding


SOUND = b.batchnorm(b.batch_norm(), b.batch_norm("fixed", keeps="fixed", momentum=None, tracked=None))
KEEPS_NONE = b.batch_norm(keeps="none", default=None, finite=None, zero_variances=None, tracked=None, kept=None)


@pytest.mark.parametrize("code", ["NP701", "NP702", "NP703", "NP704", "NP705", "NP706"])
def test_sound_norms_raise_nothing(code: str) -> None:
    assert judge(code, SOUND) == ((), ())
    assert judge(code, b.batchnorm(KEEPS_NONE)) == ((), ())


@pytest.mark.parametrize("code", ["NP701", "NP702", "NP703", "NP704", "NP705", "NP706"])
def test_a_norm_that_was_not_measured_is_skipped(code: str) -> None:
    data = b.document(norms=(b.norm("bn", kind="batchnorm"),))
    found, skipped = run(data, [find(code)])
    assert found == ()
    assert [row.why for row in skipped] == ["what it stores and what it is given was not measured"]
    still = b.norm("bn", kind="batchnorm", executed=False)
    assert run(b.document(norms=(still,)), [find(code)]) == ((), ())


@pytest.mark.parametrize(("gap", "severity"), [(0.3, None), (0.31, "warning"), (math.inf, "warning")])
def test_np701_has_its_limit(gap: float, severity: str | None) -> None:
    found, _ = judge("NP701", b.batchnorm(b.batch_norm(), train_eval_gap=gap), init=init(None))
    assert [f.severity.value for f in found] == ([severity] if severity else [])


def test_np701_allows_what_chance_explains() -> None:
    """Four values in each of two norms: the root of 1.5 (1/4 + 1/4)."""
    few = b.batch_norm(count=4), b.batch_norm("other", count=4)
    chance = math.sqrt(1.5 * 0.5)
    assert judge("NP701", b.batchnorm(*few, train_eval_gap=chance * 0.999)) == ((), ())
    (found,), _ = judge("NP701", b.batchnorm(*few, train_eval_gap=chance * 1.001))
    assert found.message == "outputs in train and in eval mode differ by 86.69 % of their norm; bn lies 0.01 nat apart"


def test_np701_is_a_note_before_training_and_a_skip_where_it_was_not_asked_for() -> None:
    assert one("NP701", b.batch_norm(), False, train_eval_gap=0.9).severity.value == "note"
    assert one("NP701", b.batch_norm(), True, train_eval_gap=0.9).severity.value == "warning"
    _, (skipped,) = judge("NP701", b.batchnorm(b.batch_norm(), train_eval_gap=None))
    assert 'ask for the measure "batchnorm"' in skipped.why


def test_np702_warns_of_one_value_and_notes_few() -> None:
    one_value = b.batch_norm(count=1, shape=(1, 4, 1, 1), training=True)
    found = one("NP702", one_value, training=True, samples=1)
    assert (found.severity.value, found.value) == ("warning", 1.0)
    assert "train mode cannot run on this batch; its map is one place large" in found.message
    few = one("NP702", b.batch_norm(count=15, training=True), training=True)
    assert (few.severity.value, few.message) == ("note", "15 values a channel in this batch")
    assert judge("NP702", b.batchnorm(b.batch_norm(count=16, training=True), training=True)) == ((), ())


@pytest.mark.parametrize(
    ("site", "training"),
    [({"training": True}, False), ({"training": False}, True), ({"training": True, "keeps": "fixed"}, True)],
)
def test_np702_asks_train_mode_alone(site: dict[str, Any], training: bool) -> None:
    assert judge("NP702", b.batchnorm(b.batch_norm(count=1, **site), training=training)) == ((), ())


def test_np703_states_the_share_and_leaves_fixed_statistics_alone() -> None:
    found = one("NP703", b.batch_norm(padding=16))
    assert (found.value, found.message) == (0.25, "16 of the 64 places behind each of its statistics are padding")
    assert judge("NP703", b.batchnorm(b.batch_norm(padding=16, keeps="fixed"))) == ((), ())


@pytest.mark.parametrize(("samples", "severity"), [(15, "warning"), (16, "note")])
def test_np704_judges_by_the_samples_of_a_process(samples: int, severity: str) -> None:
    found = one("NP704", b.batch_norm(), samples=samples, processes=2)
    assert (found.severity.value, found.value) == (severity, samples)


def test_np704_knows_shared_statistics_and_says_what_it_does_not_know() -> None:
    assert judge("NP704", b.batchnorm(b.batch_norm(synchronised=True), processes=2)) == ((), ())
    found, skipped = judge("NP704", b.batchnorm(b.batch_norm(synchronised=None), processes=2))
    assert found == ()
    assert [row.what for row in skipped] == ["NP704 unsynchronised-batch-norm at bn"]


DEFAULT: dict[str, Any] = {"default": True, "tracked": 0, "initial_share": 1.0}
FAR = b.kept(divergence=2.0)


@pytest.mark.parametrize(
    ("site", "trained", "severity", "words"),
    [
        ({"finite": False, "kept": None}, False, "error", "not finite, or a variance is negative"),
        ({"zero_variances": 4}, False, "error", "all 4 stored variances are 0"),
        ({"default": True, "tracked": 50}, False, "warning", "although 50 batches were counted"),
        (DEFAULT, True, "warning", "although the weights look trained"),
        ({**DEFAULT, "kept": FAR}, None, "warning", "which this batch does not fit: in the median channel 2 nat"),
        ({"zero_variances": 1}, True, "note", "1 of 4 stored variances are 0"),
        ({"tracked": 28, "initial_share": 0.9**28}, True, "note", "after 28 batches the values at the start still"),
        ({"kept": FAR}, True, "note", "the batch does not fit the stored statistics"),
        ({"kept": FAR, "keeps": "fixed", "tracked": None, "initial_share": None}, True, "note", "does not fit"),
    ],
)
def test_np705_is_as_severe_as_it_is_sure(
    site: dict[str, Any], trained: bool | None, severity: str, words: str
) -> None:
    found = one("NP705", b.batch_norm(**site), trained)
    assert found.severity.value == severity
    assert words in found.message


@pytest.mark.parametrize(
    ("site", "trained"),
    [
        (DEFAULT, False),
        ({**DEFAULT, "kept": FAR}, False),  # a fresh model
        (DEFAULT, None),  # which the batch fits
        ({"tracked": 29, "initial_share": 0.9**29}, True),
        ({"kept": b.kept(divergence=0.5)}, True),
    ],
)
def test_np705_passes_what_is_fresh_or_fits(site: dict[str, Any], trained: bool | None) -> None:
    assert judge("NP705", b.batchnorm(b.batch_norm(**site)), init=init(trained)) == ((), ())


def test_gains_that_were_drawn_too_do_not_make_a_fresh_model_a_stale_one() -> None:
    """As MobileViT's batch norms start: whether the weights look trained is open then, that they were drawn is not."""
    fresh = init(None, drawn=1.0)
    assert judge("NP705", b.batchnorm(b.batch_norm(**{**DEFAULT, "kept": FAR})), init=fresh) == ((), ())
    (gap,), _ = judge("NP701", b.batchnorm(b.batch_norm(), train_eval_gap=0.9), init=fresh)
    assert gap.severity.value == "note"


@pytest.mark.parametrize("facts", [{}, DEFAULT])
def test_np705_says_nothing_of_a_batch_that_is_not_finite(facts: dict[str, Any]) -> None:
    lost = b.batch_norm("after", kept=b.kept(divergence=math.nan), **facts)
    (found,), (skip,) = judge("NP705", b.batchnorm(b.batch_norm("bn", finite=False, kept=FAR), lost))
    assert (found.where, found.severity.value) == ("bn", "error")
    assert (skip.what, skip.why) == (
        "NP705 stale-statistics at after",
        "the batch that it was given is not finite (NP504)",
    )


def test_np705_gathers_norms_with_the_same_fault() -> None:
    sites = tuple(b.batch_norm(f"blocks.{i}.bn", finite=False, kept=None) for i in range(3))
    (found,), _ = judge("NP705", b.batchnorm(*sites))
    assert found.places == tuple(site.path for site in sites)


@pytest.mark.parametrize(
    ("site", "model", "words"),
    [
        ({"training": False}, {"training": True}, "its train flag is off while the model's is on"),
        ({"learns": False}, {}, "its gain and offset are frozen, its statistics are not"),
        ({"learns": False, "training": True}, {"training": True}, "its gain and offset are frozen"),
    ],
)
def test_np706_finds_both_ways_to_freeze(site: dict[str, Any], model: dict[str, Any], words: str) -> None:
    assert words in one("NP706", b.batch_norm(**site), **model).message


@pytest.mark.parametrize(
    ("site", "model"),
    [
        ({"training": True}, {"training": True}),
        ({"training": False}, {"training": False}),
        ({"training": False, "keeps": "fixed"}, {"training": True}),
        ({"learns": False}, {"others_learn": False}),  # the whole model is frozen: it is used, not trained
        ({"learns": None}, {}),  # no gain that could be frozen
        ({"learns": False, "keeps": "fixed"}, {}),
    ],
)
def test_np706_passes_what_stays_frozen_or_learns(site: dict[str, Any], model: dict[str, Any]) -> None:
    assert judge("NP706", b.batchnorm(b.batch_norm(**site), **model)) == ((), ())


def test_the_basis_of_the_builder_counts_samples() -> None:
    assert b.batchnorm(samples=3).basis == Basis(unit="1", dtype="float32", count=3)
