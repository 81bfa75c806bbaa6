"""What the checks share that judge every norm by itself."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from normprobe.checks.base import Check, Outcome
from normprobe.records import Finding, NormSite, ReportData
from normprobe.theory import BFLOAT16, FLOAT16, Format, format_of


@dataclass(frozen=True)
class EachNormCheck(Check):
    """Base of a check that judges every norm by itself; norms that cannot be judged are skipped by their reason."""

    def check(self, data: ReportData) -> Outcome:
        """Yield what `judge` finds, and one skip for each reason why norms could not be judged."""
        if not data.anatomy.norms:
            yield self.skip("no norm was found")
        unknown: dict[str, list[str]] = {}
        for norm in data.anatomy.norms:
            verdict = self.judge(norm, data)
            if isinstance(verdict, Finding):
                yield verdict
            elif verdict is not None:
                unknown.setdefault(verdict, []).append(norm.path)
        for why, paths in unknown.items():
            yield self.skip(why, paths)

    @abstractmethod
    def judge(self, norm: NormSite, data: ReportData) -> Finding | str | None:
        """The fault of `norm`, or the reason why it cannot be told, or None where it is sound."""


@dataclass(frozen=True)
class Seen:
    """The dtype in which a norm gets its input.

    Attributes:
        form: its format, None where that is not known.
        text: its name, all dtypes of the model where the norm's own was not recorded; empty where not even they are
            known.
        sure: whether it is the one dtype; else `form` is the one of them with which most goes wrong.
    """

    form: Format | None
    text: str
    sure: bool


def seen_by(norm: NormSite, data: ReportData) -> Seen:
    """The dtype of the norm's input as recorded, under autocast and casts too; else that of the model.

    A model with weights in several dtypes stands for the one with the smallest range among float16 and bfloat16, so
    that a norm whose input was not recorded is not taken for harmless. Other dtypes beside them are storage.
    """
    text = norm.dtype or data.target.dtype
    names = [name.strip() for name in text.split(",")]
    known = [form for form in map(format_of, names) if form is not None]
    half = next((form for form in (FLOAT16, BFLOAT16) if form in known), None)
    widest = max(known, key=lambda form: form.largest, default=None)
    return Seen(half or widest, text, len(names) == 1)
