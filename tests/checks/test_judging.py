"""Which checks run under which settings, with which limits, and where they are silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from normprobe.checks import ALL, SweepCheck, chosen_checks, judged, run
from normprobe.checks.base import Check, Outcome
from normprobe.checks.silence import covers
from normprobe.errors import SettingError
from normprobe.measures import massive, outliers
from normprobe.records import ReportData, Settings, Severity, Skipped
from tests.checks import builders as b

OUTSIDE = {"eps_placement": "outside_sqrt"}
ONLY = ("NP101", "NP201", "NP401")  # what the documents here are about


def codes(settings: Settings) -> list[str]:
    return [check.code for check in chosen_checks(settings)[0]]


def faulty() -> ReportData:
    """NP101 at two norms with different eps, NP201, and logits of 71 (NP401)."""
    return b.document(
        norms=(b.norm("text.0.norm", **OUTSIDE), b.norm("vision.0.norm", eps=1e-6, **OUTSIDE)),
        streams=(b.stream(final_norm=None),),
        attention=(b.site(),),
    ).model_copy(update={"measurements": b.document(attention=(b.site(),)).measurements})


def hot() -> ReportData:
    """Logits that reach 71."""
    measured = b.document().measurements.model_copy(update={"attention": (b.logits(3.0, 71.0),)})
    return b.document().model_copy(update={"measurements": measured})


def test_without_settings_all_checks_run_as_they_are() -> None:
    chosen, ignored = chosen_checks(Settings())
    assert (chosen, ignored) == (ALL, ())
    found = judged(faulty(), Settings())
    assert (found.findings, found.skipped) == run(faulty())
    assert found.checks == tuple(check.code for check in ALL if not isinstance(check, SweepCheck))


@pytest.mark.parametrize("words", [["NP401"], "np401", ["401"], ["unresolved-logits"], ["Unresolved_Logits"]])
def test_a_check_is_selected_by_code_number_or_name(words: list[str] | str) -> None:
    assert codes(Settings.model_validate({"select": words})) == ["NP401"]


@pytest.mark.parametrize("words", ["all", "ALL", "NP"])
def test_all_checks_have_a_word(words: str) -> None:
    assert codes(Settings(select=(words,))) == [check.code for check in ALL]
    assert codes(Settings(select=(words,), ignore=("NP", "all"))) == []


@pytest.mark.parametrize("words", ["NP2", "2", ["np2"]])
def test_the_start_of_codes_selects_all_of_them(words: list[str] | str) -> None:
    assert codes(Settings.model_validate({"select": words})) == [c.code for c in ALL if c.code.startswith("NP2")]


def test_ignore_takes_away_from_what_is_selected() -> None:
    chosen = codes(Settings(select=("NP2", "NP4"), ignore=("missing-final-norm",)))
    assert "NP208" in chosen
    assert "NP201" not in chosen
    assert codes(Settings(ignore=("NP",))) == []


def test_what_does_not_run_is_said_with_its_reason() -> None:
    _, ignored = chosen_checks(Settings(select=("NP2", "NP4"), ignore=("NP401",)))
    assert {(one.code, one.why) for one in ignored} >= {("NP401", "in ignore"), ("NP101", "not in select")}
    ran = set(codes(Settings(select=("NP2", "NP4"), ignore=("NP401",))))
    assert {one.code for one in ignored} | ran == {check.code for check in ALL}
    assert all(one.findings is None for one in ignored)


def test_a_check_that_does_not_run_says_nothing_at_all() -> None:
    found = judged(ReportData(), Settings(select=("NP201",)))
    assert [one.what for one in found.skipped] == ["NP201 missing-final-norm"]
    assert judged(faulty(), Settings(select=ONLY, ignore=("NP201", "NP101"))).findings == ()


def test_a_limit_of_the_settings_is_what_is_compared_and_what_is_said() -> None:
    (finding,) = judged(hot(), Settings(select=ONLY)).findings
    assert (finding.limit, finding.source[:10]) == (50.0, "Gemma Team")
    (finding,) = judged(hot(), Settings(select=ONLY, limits={"NP401": {"max_logit": 60}})).findings
    assert finding.limit == 60.0
    assert finding.source.startswith("settings, in place of 50 (Gemma Team")
    assert judged(hot(), Settings(select=ONLY, limits={"unresolved-logits": {"max_logit": 71.0}})).findings == ()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"select": "NP99"},
            r"(?s)`select` of the settings: no check is called 'NP99'.*expected: a code such as NP201",
        ),
        ({"select": ""}, ""),
        ({"ignore": ["missing-fnal-norm"]}, r"(?s)`ignore` of.*did you mean NP201 missing-final-norm"),
        ({"ignore": [""]}, "no check is called ''"),
        (
            {"per_path_ignores": {"a.*": ["NP9"]}},
            r"`per-path-ignores.'a\.\*'` of the settings: no check is",
        ),
        ({"limits": {"NP4": {"max_logit": 3.0}}}, "`limits.NP4` of the settings: there is no check called 'NP4'"),
        (
            {"limits": {"NP401": {"maxlogit": 3.0}}},
            r"(?s)NP401 unresolved-logits has no limit 'maxlogit'.*expected: max_logit.*did you mean max_logit\?",
        ),
        (
            {"limits": {"NP201": {"warn": 3.0}}},
            r"(?s)NP201 missing-final-norm has no limit 'warn'.*this check has",
        ),
        ({"select": "NP99", "source": "n.toml"}, r"`select` in n\.toml: no check"),
    ],
)
def test_what_does_not_exist_is_refused_with_its_place(settings: dict[str, object], said: str) -> None:
    known = Settings.model_validate(settings)
    if not said:
        assert chosen_checks(known) == (ALL, ())
        return
    with pytest.raises(SettingError, match=said):
        judged(ReportData(), known)


@pytest.mark.parametrize("value", [True, "60", float("nan"), float("inf"), None])
def test_a_limit_is_a_finite_number(value: object) -> None:
    with pytest.raises(ValidationError, match=r"limits\.NP401\.max_logit"):
        Settings.model_validate({"limits": {"NP401": {"max_logit": value}}})


def test_a_place_can_be_silent_and_that_is_counted() -> None:
    found = judged(faulty(), Settings(select=ONLY, per_path_ignores={"vision": ("NP1", "NP4")}))
    assert [f.where for f in found.findings if f.code == "NP101"] == ["text.0.norm"]
    assert [(one.code, one.findings, one.why) for one in found.ignored if one.findings] == [
        ("NP101", 1, "in per-path-ignores of vision")
    ]
    assert "NP101" in found.checks
    assert judged(faulty(), Settings(per_path_ignores={"vision": ("NP4",)})).ignored == ()


def test_a_finding_speaks_of_the_places_that_are_left() -> None:
    both = b.document(norms=tuple(b.norm(f"{name}.norm", **OUTSIDE) for name in ("text", "vision")))
    (gathered,) = judged(both, Settings(select=ONLY)).findings
    assert gathered.places == ("text.norm", "vision.norm")
    (single,) = judged(both, Settings(select=ONLY, per_path_ignores={"text": ("NP101",)})).findings
    assert (single.where, single.places) == ("vision.norm", ())
    sites = (b.logits(71.0, path="text.attn"), b.logits(80.0, path="vision.attn"))
    data = b.document(attention=(b.site("text.attn"), b.site("vision.attn")))
    data = data.model_copy(update={"measurements": data.measurements.model_copy(update={"attention": sites})})
    (whole,) = judged(data, Settings(select=ONLY)).findings
    assert (whole.value, whole.places) == (80.0, ("text.attn", "vision.attn"))
    fewer = judged(data, Settings(select=ONLY, per_path_ignores={"vision": ("NP401",)}))
    (spoken,) = fewer.findings
    assert (spoken.where, spoken.value, spoken.places) == ("text.attn", 71.0, ())
    assert "reach 71 " in spoken.message
    assert "80" not in spoken.message
    assert [(one.code, one.why, one.findings) for one in fewer.ignored if one.findings] == [
        ("NP401", "in per-path-ignores of vision", 1)
    ]
    assert judged(data, Settings(select=ONLY, per_path_ignores={"vision": ("4",), "text.*": ("4",)})).findings == ()


@pytest.mark.parametrize(("name", "measured"), [("max_ratio", massive.RATIO), ("max_channel_ratio", outliers.RATIO)])
def test_a_limit_goes_no_lower_than_what_is_measured(name: str, measured: float) -> None:
    assert codes(Settings(limits={"NP303": {name: measured}}))
    told = rf"`limits\.NP303\.{name}` of the settings: NP303 .* cannot judge by a {name} of {measured - 1:g}"
    with pytest.raises(SettingError, match=told):
        chosen_checks(Settings(limits={"NP303": {name: measured - 1}}))


@final
@dataclass(frozen=True)
class Apart(Check):
    """Norms that are not alike.

    They are compared with each other.
    """

    code, name, severity, since = "NP998", "apart", Severity.WARNING, "0.1.0"

    def check(self, data: ReportData) -> Outcome:
        paths = [norm.path for norm in data.anatomy.norms]
        if len({norm.eps for norm in data.anatomy.norms}) > 1:
            yield self.finding(paths[0], f"{len(paths)} norms are not alike", source="choice", places=paths)


def test_a_finding_that_says_nothing_of_the_places_left_alone_stays_for_them_and_says_so() -> None:
    data = b.document(norms=(b.norm("a"), b.norm("b"), b.norm("c", eps=1e-3)))
    checks = (Apart(),)
    (whole,) = judged(data, Settings(), checks).findings
    assert whole.places == ("a", "b", "c")
    found = judged(data, Settings(per_path_ignores={"c": ("NP998",)}), checks)
    (part,) = found.findings
    assert (part.where, part.places) == ("a", ("a", "b"))
    assert part.message == f"{whole.message}; said of 3 places, of which settings ignore 1"
    assert [(one.code, one.findings, one.why) for one in found.ignored] == [("NP998", 1, "in per-path-ignores of c")]
    (fewer,) = judged(data, Settings(per_path_ignores={"a": ("NP998",)}), checks).findings
    assert (fewer.message, fewer.places) == ("2 norms are not alike", ("b", "c"))


def test_one_block_of_a_finding_of_a_stream_can_be_silent() -> None:
    rows = [b.branch(f"blocks.{i}", kind=kind) for i in range(3) for kind in ("attention", "mlp")]
    bare = {"placement": "none", "pre_norm": None}
    branches = tuple(one.model_copy(update=bare) if one.kind == "mlp" else one for one in rows)
    data = b.document(streams=(b.stream(branches=branches, depth=6),))
    (whole,) = judged(data, Settings(select=("NP213",))).findings
    assert whole.places == ("blocks.0", "blocks.1", "blocks.2")
    found = judged(data, Settings(select=("NP213",), per_path_ignores={"blocks.0": ("NP213",)}))
    (left,) = found.findings
    assert (left.where, left.places) == ("blocks.1", ("blocks.1", "blocks.2"))
    assert "said of 3 places, of which settings ignore 1" in left.message
    assert [one.why for one in found.ignored if one.findings] == ["in per-path-ignores of blocks.0"]
    assert judged(data, Settings(select=("NP213",), per_path_ignores={"blocks.?": ("NP2",)})).findings == ()


def test_a_pattern_that_covers_no_place_is_told() -> None:
    settings = Settings(select=ONLY, per_path_ignores={"blocks": ("NP201",), "visoin.*": ("NP4",), "norm": ("NP1",)})
    data = hot().model_copy(update={"notes": ("a note of the loader",)})
    found = judged(data, settings)
    told = "per-path-ignores: 'visoin.*' covers no place of this model that a check speaks of"
    assert found.notes == ("a note of the loader", told)
    assert judged(found, settings).notes == found.notes
    assert judged(found, Settings()).notes == data.notes


@pytest.mark.parametrize(
    ("pattern", "place", "covered"),
    [
        ("vision", "vision", True),
        ("vision", "vision.0.norm", True),
        ("vision", "vision#aten.mul:3", True),
        ("vision", "visionary.norm", False),
        ("vision", "text.vision.norm", False),
        ("*.vision", "text.vision.norm", True),
        ("layers.[0-3]", "layers.2.attn", True),
        ("layers.[0-3]", "layers.4.attn", False),
        ("layers.?", "layers.12", False),
        ("*.norm", "a.b.norm", True),
        ("Vision", "vision", False),
        (".", ".", True),
        (".", "a.b", False),
        ("*", "a.b", True),
    ],
)
def test_patterns_cover_modules_and_what_is_in_them(pattern: str, place: str, covered: bool) -> None:
    assert covers(pattern, place) is covered


@given(st.lists(st.from_regex(r"[a-z]{1,3}|[0-9]", fullmatch=True), min_size=1, max_size=4))
def test_a_path_covers_itself_and_all_below(parts: list[str]) -> None:
    path = ".".join(parts)
    assert covers(path, path)
    assert covers(path, f"{path}.deeper.still")
    assert not covers(f"{path}.deeper", path)


def test_judging_again_changes_what_checks_say_and_nothing_else() -> None:
    read = Skipped(what="vision", why="it could not be read")
    first = judged(hot().model_copy(update={"skipped": (read,)}), Settings(select=ONLY))
    again = judged(first, Settings(select=ONLY, ignore=("NP401",)))
    assert again.findings == ()
    assert again.skipped == first.skipped == (read,)
    assert again.measurements == first.measurements
    assert judged(again, first.settings) == first
    unknown = judged(ReportData(skipped=(read,)), Settings())
    assert judged(unknown, Settings(select=("NP201",))).skipped[0] == read
    assert len(judged(unknown, Settings(select=("NP201",))).skipped) == 2
