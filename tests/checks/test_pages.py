"""The pages of the checks: those in the repository are current, and every file says what its check says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from normprobe.checks import ALL, documentation
from normprobe.checks.pages import FOLDER, pages, write


def test_the_pages_in_the_repository_are_current(root: Path) -> None:
    found = {path.name: path.read_text(encoding="utf-8") for path in (root / FOLDER).iterdir()}
    assert found == pages(), "run: make docs"


def test_there_is_one_page_a_check_and_a_table_of_all() -> None:
    texts = pages()
    assert texts.keys() == {*(f"{check.code}.md" for check in ALL), "index.md"}
    for check in ALL:
        assert texts[f"{check.code}.md"].endswith(documentation(check))
        (row,) = re.findall(rf"^\| \[{check.code}\]\({check.code}\.md\) \| (.*)$", texts["index.md"], re.M)
        assert row.startswith(f"{check.name} | {check.severity.value} | {', '.join(check.needs.words())} |")
        assert row.endswith(f"{check.summary()} |")


def test_the_table_has_a_part_for_each_subject_in_the_order_of_the_codes() -> None:
    index = pages(reversed(ALL))["index.md"]
    digits = dict.fromkeys(check.code[2] for check in sorted(ALL, key=lambda check: check.code))
    assert [title[-4] for title in re.findall(r"^## (.+)$", index, re.M)] == list(digits)
    assert index == pages()["index.md"]


@pytest.mark.parametrize("name", ["index.md", *(f"{check.code}.md" for check in ALL)])
def test_links_lead_to_pages(name: str) -> None:
    texts = pages()
    assert {link for link in re.findall(r"\]\(([^)#:]+)\)", texts[name])} <= texts.keys()


def test_writing_removes_pages_of_checks_that_are_no_more(tmp_path: Path, root: Path) -> None:
    (tmp_path / "NP999.md").write_text("old")
    (tmp_path / "picture.svg").write_text("kept")
    write(tmp_path / "deeper", ALL[:1])
    assert {path.name for path in (tmp_path / "deeper").iterdir()} == {f"{ALL[0].code}.md", "index.md"}
    command = [sys.executable, "-m", "normprobe.checks.pages", str(tmp_path)]
    subprocess.run(command, check=True, cwd=root)
    assert {path.name for path in tmp_path.glob("*.*")} == {*pages(), "picture.svg"}
