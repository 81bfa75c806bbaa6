"""NP108."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

from normprobe.checks.norms.each_norm import EachNormCheck
from normprobe.records import Finding, NormSite, ReportData, Severity

UNCENTRED = frozenset({"rmsnorm", "l2norm", "scalenorm", "dyt", "grn", "identity", "affine"})
CENTRED = frozenset({"layernorm", "batchnorm", "groupnorm", "instancenorm"})
CONTRADICTIONS = {
    "RMSNorm": CENTRED | {"dyt", "grn", "identity", "affine"},
    "LayerNorm": UNCENTRED | {"batchnorm"},
    "BatchNorm": (CENTRED | {"rmsnorm", "l2norm", "scalenorm", "dyt", "grn"}) - {"batchnorm"},
    "GroupNorm": UNCENTRED | {"batchnorm"},
    "InstanceNorm": UNCENTRED | {"batchnorm", "layernorm"},
}
SPELLINGS = {"rms": "RMSNorm", "layernorm": "LayerNorm"} | {
    f"{word}norm": f"{word.capitalize()}Norm" for word in ("batch", "group", "instance")
}

_PARTED = re.compile("group|head")  # a name that says that the features are parted


@final
@dataclass(frozen=True)
class NameContradictsBehaviour(EachNormCheck):
    """A class is named after one kind of norm and computes another.

    ## What it measures

    What the class name claims (layer, RMS, batch, group or instance norm) against the kind that was found by
    feeding inputs. This is the only check that reads a class name, since the name is its subject. A name that
    claims nothing, or two things, is not judged.

    ## Why it matters

    Readers, ports and filters go by the name. T5LayerNorm subtracts no mean: a port that uses a layer norm
    gives other outputs, and a fold of the mean into the weights is wrong. A note, since the model computes
    what it was trained with.

    ## What to do

    Rename the class where it is yours; otherwise port by the kind that the report states.

    ## When to ignore it

    When the name is historical and known, as T5's is. Forms that coincide are not reported: a group norm with
    one group may be called layer norm, one group per channel instance norm; so may a layer norm of several groups
    whose name speaks of groups or heads.

    ## References

    Raffel et al. 2020 (T5), sec. 2.1: a layer norm without mean and bias; Zhang & Sennrich 2019 named it
    RMSNorm.
    """

    code, name, severity, since = "NP108", "name-contradicts-behaviour", Severity.NOTE, "0.1.0"

    def judge(self, norm: NormSite, data: ReportData) -> Finding | str | None:
        """One finding where the norm's class name claims another kind."""
        claim = claimed(norm.class_name)
        if claim is None:
            return None
        if norm.kind == "unknown":
            return "the kind of norm could not be told"
        if norm.kind not in CONTRADICTIONS[claim] and not (claim == "LayerNorm" and _no_layer(norm)):
            return None
        mean = {True: " that subtracts the mean", False: " that subtracts no mean", None: ""}
        groups = f" of {norm.groups} groups" if norm.groups else ""
        return self.finding(
            norm.path,
            f"{norm.class_name} is named {claim}; it computes {norm.kind}{groups}{mean[norm.subtracts_mean]}",
            value=norm.kind,
            source="the class name",
        )


def _no_layer(norm: NormSite) -> bool:
    """Whether a norm takes its statistic of groups of which its name does not speak, or over inner axes, where a layer
    norm takes the last ones."""
    if norm.kind == "groupnorm":
        return (norm.groups or 1) > 1 and not _PARTED.search(norm.class_name.lower())
    return norm.kind == "instancenorm" and -1 not in norm.axes


def claimed(class_name: str) -> str | None:
    """The kind of norm that a class name claims, or None where it claims none or several.

    An RMS in front of another word decides (RMSLayerNorm, GroupRMSNorm), provided that it speaks of a norm.
    """
    name = class_name.lower().replace("_", "")
    if "norm" not in name:
        return None
    claims = [claim for spelling, claim in SPELLINGS.items() if spelling in name]
    if "RMSNorm" in claims:
        return "RMSNorm"
    return claims[0] if len(claims) == 1 else None
