"""The JSON Schemas of a report and of a comparison, as `--format json` prints them.

`python -m normprobe.records.schema` writes that of a report out, with `diff` behind it that of a comparison.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from normprobe.records.base import Record
from normprobe.records.diff import DiffData
from normprobe.records.report import ReportData

_NOT_FINITE = {"enum": ["NaN", "Infinity", "-Infinity"]}


def json_schema(document: type[Record] = ReportData) -> dict[str, Any]:
    """The schema (draft 2020-12) of a document; a number that is not finite is one of three strings.

    Args:
        document: `ReportData` for `normprobe-report/1`, `DiffData` for `normprobe-diff/1`.
    """
    schema = document.model_json_schema(by_alias=True, mode="serialization")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    widened: dict[str, Any] = _with_not_finite(schema)
    return widened


def _with_not_finite(node: Any) -> Any:
    if isinstance(node, list):
        return [_with_not_finite(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "number":
        rest = {key: value for key, value in node.items() if key != "type"}
        return rest | {"anyOf": [{"type": "number"}, _NOT_FINITE]}
    return {key: _with_not_finite(value) for key, value in node.items()}


if __name__ == "__main__":
    print(json.dumps(json_schema(DiffData if sys.argv[1:] == ["diff"] else ReportData), indent=1))
