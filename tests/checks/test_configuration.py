"""Settings from files: where they are looked for, what they say, and how a mistake in one is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import normprobe
from normprobe.checks import load_settings
from normprobe.errors import SettingError
from normprobe.records import Settings

WHOLE = """
select = ["NP1", "NP4"]
ignore = ["eps-outside-root"]
fail-on = "warning"

[per-path-ignores]
"vision.*" = ["NP401"]

[limits.NP401]
max_logit = 60
"""


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_a_file_says_everything(tmp_path: Path) -> None:
    path = write(tmp_path, "normprobe.toml", WHOLE)
    assert load_settings(path) == Settings(
        select=("NP1", "NP4"),
        ignore=("eps-outside-root",),
        per_path_ignores={"vision.*": ("NP401",)},
        limits={"NP401": {"max_logit": 60.0}},
        fail_on="warning",
        source=str(path),
    )
    assert normprobe.load_settings is load_settings


def test_pyproject_has_the_same_in_a_table(tmp_path: Path) -> None:
    text = (
        '[project]\nname = "x"\n[tool.normprobe]\nselect = "NP1, NP4"\n[tool.normprobe.limits.NP401]\nmax_logit = 6.5\n'
    )
    found = load_settings(write(tmp_path, "pyproject.toml", text))
    assert (found.select, found.limits) == (("NP1", "NP4"), {"NP401": {"max_logit": 6.5}})


def test_the_nearest_file_above_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    write(tmp_path / "a", "normprobe.toml", 'ignore = ["NP1"]')
    write(tmp_path / "a" / "b", "pyproject.toml", '[project]\nname = "no table of ours"')
    assert (load_settings().ignore, load_settings().source) == (("NP1",), "../../normprobe.toml")
    write(tmp_path / "a" / "b", "pyproject.toml", '[tool.normprobe]\nignore = ["NP2"]')
    assert (load_settings().ignore, load_settings().source) == (("NP2",), "../pyproject.toml")
    write(tmp_path / "a" / "b", "normprobe.toml", 'ignore = ["NP4"]')
    assert load_settings().ignore == ("NP4",)


def test_an_empty_table_counts_as_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "normprobe.toml", 'ignore = ["NP1"]')
    monkeypatch.chdir(write(tmp_path / "a", "pyproject.toml", "[tool.normprobe]").parent)
    assert load_settings() == Settings(source="pyproject.toml")


def test_none_anywhere_is_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings() == Settings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "# x\n\nselct = []",
            r"(?s)unknown key `selct` in .*normprobe\.toml, line 3.*expected: select, .*did you mean select\?",
        ),
        ("fail_on = 'error'", r"(?s)unknown key `fail_on`.*did you mean fail-on\?"),
        ("source = 'x'", "unknown key `source`"),
        ("fail-on = 'fatal'", r"(?s)`fail-on` in .*expected: 'error', 'warning', 'note' or 'never'.*found: 'fatal'"),
        ("select = 3", r"(?s)`select` in .*wrong kind.*expected: a list of names, or.*found: 3"),
        ("select = [3]", r"`select\.0` in "),
        (
            "[limits.NP401]\nmax_logit = 'high'",
            r"(?s)`limits\.NP401\.max_logit` in .*expected: a number.*found: 'high'",
        ),
        ("[limits.NP401]\nmax_logit = nan", r"(?s)`limits\.NP401\.max_logit` in .*a finite number"),
        (
            "ignore = [\n 'NP1',\n]\n# more\nselect = [\n 'NP1',\n 3,\n]",
            r"`select\.1` in .*normprobe\.toml, line 5 has",
        ),
        (
            "[limits.NP401]\n\nmax_logit = -1",
            r"(?s)`limits\.NP401\.max_logit` in .*, line 3: NP401 .*expected: 0 or more\n",
        ),
        (
            "[limits.NP401]\nmax_logit = 60\n[limits.unresolved-logits]\nmax_logit = 70",
            r"(?s)`limits\.unresolved-logits` in .*, line 3: NP401 .* two names.*found: NP401 and unresolved-logits",
        ),
        ("[limits]\nNP401 = 60", r"(?s)`limits\.NP401` in .*expected: a table"),
        (
            "[limits.NP401]\nwarn = 60",
            r"(?s)`limits\.NP401\.warn` in .*normprobe\.toml, line 2: NP401 .* no limit 'warn'",
        ),
        ("ignore = ['NP77']", r"`ignore` in .*normprobe\.toml, line 1: no check is called 'NP77'"),
        ("[per-path-ignores]\n'a.b' = ['b']", r"`per-path-ignores\.'a\.b'` in .*, line 2: no check is called 'b'"),
        ("select = = 1", r"(?s)normprobe\.toml is no TOML.*line 1"),
    ],
)
def test_a_mistake_is_told_with_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        load_settings(write(tmp_path, "normprobe.toml", text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[project]\n[tool.normprobe]\nselct = []", "unknown key `tool.normprobe.selct` in .*, line 3"),
        ("[tool.normprobe]\n[tool.normprobe.limits.NP401]\nwarn = 1", "`limits.NP401.warn` in .*, line 3: "),
        ("[tool.normprobe]\nfail-on = 1", "`tool.normprobe.fail-on` in "),
        ("[tool]\nnormprobe = 3", "`tool.normprobe` in .* is no table"),
        ("[project]\nname = 'x'", r"(?s)no settings in .*expected: a table \[tool\.normprobe\]"),
        ("tool = 3", "no settings in "),
    ],
)
def test_keys_in_pyproject_are_told_with_their_table(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        load_settings(write(tmp_path, "pyproject.toml", text))


def test_a_file_that_is_not_there_or_is_no_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"(?s)cannot read the settings in .*none\.toml.*No such file"):
        load_settings(tmp_path / "none.toml")
    with pytest.raises(SettingError, match=r"(?s)cannot read the settings in .*a directory"):
        load_settings(write(tmp_path / "normprobe.toml", "x", "").parent)
    (tmp_path / "n.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match=r"n\.toml is no TOML"):
        load_settings(tmp_path / "n.toml")


def test_a_mark_of_the_byte_order_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "normprobe.toml").write_bytes(b"\xef\xbb\xbf" + b'ignore = ["NP1"]\nselct = 1')
    with pytest.raises(SettingError, match=r"unknown key `selct` in .*, line 2"):
        load_settings(tmp_path / "normprobe.toml")


def test_what_is_wrong_with_the_tools_of_others_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write(tmp_path / "a", "normprobe.txt", "").parent)
    broken = write(tmp_path, "pyproject.toml", "[tool.other]\nkey = = 1")
    assert load_settings() == Settings()
    with pytest.raises(SettingError, match="is no TOML"):
        load_settings(broken)
    write(tmp_path, "pyproject.toml", "[tool.other]\nkey = = 1\n[tool.normprobe]")
    with pytest.raises(SettingError, match="is no TOML"):
        load_settings()


def test_the_example_in_the_documentation_is_read(root: Path, tmp_path: Path) -> None:
    page = (root / "docs" / "settings.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    found = load_settings(write(tmp_path, "normprobe.toml", example))
    assert (found.select, found.ignore, found.fail_on) == (("NP1", "NP2", "NP4"), ("eps-outside-root",), "warning")
    assert found.per_path_ignores == {"vision_tower": ("NP4",), "model.layers.[0-3]": ("NP303",)}
    assert found.limits == {"NP401": {"max_logit": 60.0}}
    assert all(f"`{name}`" in page or f"{name}=" in page for name in Settings.model_fields if name != "source")


def test_a_folder_of_the_name_of_the_settings_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "normprobe.toml").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match="cannot read the settings in"):
        load_settings()
