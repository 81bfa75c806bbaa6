"""What a model's configuration says about norms, attention and readout."""

from __future__ import annotations

from typing import Literal

from normprobe.records.base import Record

Fact = Literal[
    "eps",
    "qk_norm",
    "attention_softcap",
    "attention_scale",
    "window",
    "input_multiplier",
    "branch_multiplier",
    "parallel",
    "pre_norm",
    "logit_multiplier",
    "logit_softcap",
    "tied",
]


EPS_AGREES = 0.05  # by how much the eps of a norm is off a stated one that it is


class Declared(Record):
    """One fact that a configuration states.

    Attributes:
        path: the module that holds the configuration, "." for the model itself; the fact is about what lies inside it
            and in no module with a configuration of its own.
        field: the name of the field, behind that of the part that it lies in ("text_config.final_logit_softcapping").
        fact: what the field states: the eps of norms, whether queries and keys are normed, the soft-cap and the factor
            on q·kᵀ, how many keys a query sees, the constant factors on embeddings, on what branches write and on
            logits, whether branches run side by side, whether norms sit before branches (else on their sums), the
            soft-cap of logits, whether head and embedding are one.
        stated: what stands in the field.
        own: of an eps that no norm on a stream has, those of them that the model's own class builds with the same
            settings from this configuration: its code does not hand the field on to them.
        value: of the fact: of `query_pre_attn_scalar` 64, the factor 0.125.
    """

    path: str
    field: str
    fact: Fact
    stated: bool | int | float
    value: bool | float
    own: tuple[str, ...] = ()
