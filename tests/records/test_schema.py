"""The published schema is current, and real reports satisfy it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn

import normprobe
from normprobe.records.schema import json_schema

PUBLISHED = Path(__file__).parents[2] / "docs" / "report.schema.json"


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.write = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.write(self.norm(x))


def test_published_schema_is_current() -> None:
    assert json.loads(PUBLISHED.read_text(encoding="utf-8")) == json_schema(), (
        "run: python -m normprobe.records.schema > docs/report.schema.json"
    )


@pytest.mark.parametrize("broken", [False, True])
def test_reports_satisfy_the_schema_with_finite_numbers_and_without(broken: bool) -> None:
    model = nn.Sequential(*(Residual() for _ in range(5)))
    if broken:
        with torch.no_grad():
            model[0].write.bias.fill_(float("nan"))  # type: ignore[union-attr]
    document = json.loads(normprobe.probe(model, torch.randn(2, 5, 8), level="backward").to_json())
    jsonschema.Draft202012Validator(json_schema()).validate(document)
    assert ('"NaN"' in json.dumps(document)) is broken


def test_schema_refuses_an_unknown_field() -> None:
    document = json.loads(normprobe.probe(Residual(), torch.randn(2, 5, 8), level="structure").to_json())
    document["anatomy"]["norms"][0]["kind"] = "batchnrom"
    with pytest.raises(jsonschema.ValidationError, match="batchnrom"):
        jsonschema.validate(document, json_schema())
