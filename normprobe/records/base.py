"""The base of every result: frozen, without tensors, to JSON and back without loss."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen result. Non-finite numbers travel through JSON as the strings "NaN", "Infinity" and "-Infinity"."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        serialize_by_alias=True,
        ser_json_inf_nan="strings",
    )
