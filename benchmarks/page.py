"""The sections that benchmarks write into docs/performance.md, each between two markers of its own."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"


def write_section(name: str, title: str, text: str, page: Path = PAGE) -> None:
    """Put `text` between the markers of section `name`; a page without them gets a section `title` at its end."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    told = page.read_text(encoding="utf-8") if page.exists() else "# Performance\n"
    block = f"{begin}\n{text}\n{end}"
    if begin in told:
        told = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: block, told, flags=re.DOTALL)
    else:
        told = f"{told.rstrip()}\n\n## {title}\n\n{block}\n"
    page.write_text(told, encoding="utf-8")
