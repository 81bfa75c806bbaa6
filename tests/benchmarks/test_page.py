"""Sections of the page of measured figures."""

from __future__ import annotations

from pathlib import Path

from benchmarks.page import write_section


def test_a_section_is_replaced_and_the_rest_of_the_page_kept(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("# Performance\n\nbefore\n")
    write_section("structure", "Structure", "one", page)
    page.write_text(page.read_text() + "\nafter\n")
    write_section("structure", "Structure", "two \\1", page)
    write_section("forward", "The measured pass", "three", page)
    text = page.read_text()
    assert "one" not in text
    assert text.index("before") < text.index("## Structure") < text.index("two \\1") < text.index("after")
    assert text.index("after") < text.index("## The measured pass") < text.index("three")
