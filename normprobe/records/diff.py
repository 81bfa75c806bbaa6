"""The document that `normprobe diff` gives: in what one model, B, is not as another, A."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from normprobe.records.base import Record
from normprobe.records.measurements import Level
from normprobe.records.report import Severity, Skipped, Target
from normprobe.records.settings import FailOn

DIFF_SCHEMA: Literal["normprobe-diff/1"] = "normprobe-diff/1"

Subject = Literal["model", "stream", "branch", "norm", "attention", "head", "weights", "signal", "output"]
Verdict = Literal["same", "differs", "unknown"]
Fact = float | str | bool | None
SiteKind = Literal["entry", "norm", "mixed", "write", "stream", "product", "head", "output"]
Relation = Literal["equal", "rounded", "scaled", "reordered", "different", "unlike"]


class Difference(Record):
    """One fact that A and B do not share, with every pair of places where it is so.

    Attributes:
        subject, fact: what is compared, as in "norm" and "eps".
        severity: "error" where the models compute another function, "warning" where the same function is rounded
            elsewhere, "note" where the form alone differs.
        a, b: the fact in each model; where places have several values, those of the first.
        where: pairs of paths in A and in B; an empty path where a model has no such part.
        message: the difference as a sentence.
    """

    subject: Subject
    fact: str
    severity: Severity
    a: Fact = None
    b: Fact = None
    where: tuple[tuple[str, str], ...] = ()
    message: str

    def fails(self, fail_on: FailOn | Severity) -> bool:
        """Whether it fails a comparison that fails from `fail_on` on."""
        return fail_on != "never" and self.severity.rank <= Severity(fail_on).rank


class Match(Record):
    """Two parts that were compared, as paths in A and in B."""

    subject: Subject
    a: str
    b: str


class WeightPair(Record):
    """The values of parameters that stand at the same place; several where they are stacked in one of the models.

    Attributes:
        relation: "equal" in every value; "rounded": one is the other after rounding to the narrower dtype of the two,
            or to bfloat16 or float16 and back; "scaled": B is `factor` times A; "reordered": the same output features
            in another order; "different"; "unlike": of shapes that cannot be compared.
        distance: ‖B − A‖ / max(‖A‖, ‖B‖) over all values; NaN where the shapes are unlike.
        factor: ⟨A, B⟩ / ⟨A, A⟩.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    relation: Relation
    distance: float
    factor: float
    count: int


class SiteDiff(Record):
    """One place of the signal, in both models on the same inputs.

    Attributes:
        kind: "entry" of a stream, what a branch reads ("norm": behind its norm), what it has "mixed" before its last
            weight (the output of attention), what it writes ("write"), the "stream" behind the add, what a "product"
            outside of streams reads, what the "head" reads, an "output".
        error: ‖B − A‖ / max(‖A‖, ‖B‖).
        noise: the same of A against A with every weight and buffer moved by one rounding.
        limit: the largest `error` that counts as rounding.
        step: whether the error is larger; None where both are not finite.
        rms_a, rms_b: root mean square of all elements.
        cosine: between both, about zero.
        count: elements; `exact` where all were compared one by one, else by random sums that hold every element.
    """

    kind: SiteKind
    a: str
    b: str
    stream: str = ""
    block: str = ""
    branch: int | None = None
    error: float
    noise: float
    limit: float
    step: bool | None
    rms_a: float
    rms_b: float
    cosine: float
    count: int
    exact: bool


class SignalDiff(Record):
    """Both models on the same inputs, site by site in the order of A's forward.

    Attributes:
        dtype: in which both ran for this.
        narrowed: dtype that the parameters and inputs of both were rounded to before; None where both have the same
            dtypes.
        first: index in `sites` of the first that parts and whose part in the stream does not come together again.
        passing: indices of sites that part although what their branch writes is the same: inner features of another
            form, such as another order.
    """

    dtype: str
    narrowed: str | None = None
    sites: tuple[SiteDiff, ...]
    first: int | None = None
    passing: tuple[int, ...] = ()


class OutputDiff(Record):
    """The first returned tensor, each model in its own dtype.

    Attributes:
        max_abs: max |B − A|; infinite where one of them is not finite.
        max_rel: the same over max |A|.
        kl: mean over tokens of KL(A ‖ B) in nats; None where it is no logits over a vocabulary.
        agreement: share of tokens with the same most likely next token; None as above.
        shape: what was compared; `shape_a` and `shape_b` where they differ.
    """

    a: str
    b: str
    dtype_a: str
    dtype_b: str
    shape: tuple[int, ...]
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    max_abs: float
    max_rel: float
    kl: float | None = None
    agreement: float | None = None
    tokens: int = 0


class DiffData(Record):
    """The whole document. Fields may be added, never renamed.

    Attributes:
        verdict: "differs" where there is an error or a warning; "unknown" where there is none and the comparison is not
            complete; else "same".
        complete: whether everything was compared that has to be equal in models that are the same; where it was not
            an error may be unseen.
        matched: the parts that were compared.
        fail_on: the mildest severity that fails the comparison.
    """

    schema_: Literal["normprobe-diff/1"] = Field(default=DIFF_SCHEMA, alias="schema")
    a: Target = Target()
    b: Target = Target()
    inputs: str = ""
    level: Level = "forward"
    versions: dict[str, str] = Field(default_factory=dict)
    verdict: Verdict = "same"
    complete: bool = True
    fail_on: FailOn = "warning"
    differences: tuple[Difference, ...] = ()
    matched: tuple[Match, ...] = ()
    weights: tuple[WeightPair, ...] = ()
    signal: SignalDiff | None = None
    output: OutputDiff | None = None
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
