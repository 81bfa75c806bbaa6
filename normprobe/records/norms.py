"""Norms: what one does by behaviour, and where it sits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from normprobe.records.base import Record
from normprobe.records.sites import OpSite

NormRole = Literal["pre", "output", "post", "final", "embedding", "query", "key", "inner", "head", "unused"]
NormKind = Literal[
    "layernorm",
    "rmsnorm",
    "l2norm",
    "scalenorm",
    "batchnorm",
    "groupnorm",
    "instancenorm",
    "lrn",
    "grn",
    "dyt",
    "affine",
    "identity",
    "unknown",
]
ON_STREAMS: frozenset[NormRole] = frozenset({"pre", "post", "output", "final"})
AffineForm = Literal["weight", "weight+bias", "one_plus_weight", "one_plus_weight+bias", "none", "other"]
EpsPlacement = Literal["inside_sqrt", "outside_sqrt", "clamp", "scaled", "none", "unknown"]
Clamped = Literal["root", "mean_square"]
Reduction = Literal["float32", "input", "native", "unknown"]
WeightMultiply = Literal["before_cast", "after_cast", "fused", "none", "unknown"]


class NormSpec(Record):
    """What one norm does, as found by feeding it inputs; `evidence` says how each fact was found.

    Attributes:
        kind: the kind by behaviour, "unknown" where no closed form fits.
        subtracts_mean: whether the mean over `axes` is subtracted; None where that is not known.
        unbiased: whether it divides by the deviation with n - 1 in place of n.
        affine: how gain and offset are stored and applied.
        eps: the constant in force in the working dtype, in the units of its placement (inside_sqrt: of the
            mean square; outside_sqrt and clamp: of the root; of the sum where the code divides by an L2 norm); None
            where it has none or was not recovered.
        eps_clamps: what a clamp is written for: it keeps the root above eps, or the mean square above eps²; None where
            there is no clamp or the constants of the code do not tell.
        axes: the axes that are reduced, counted from the end for the last axes (-1: features).
        size: number of elements that share one statistic; None where it depends on the input.
        groups: number of groups of channels with a statistic each; None where there are no groups.
        device: device on which the behaviour was measured.
    """

    kind: NormKind
    subtracts_mean: bool | None = None
    unbiased: bool = False
    affine: AffineForm = "none"
    eps: float | None = None
    eps_placement: EpsPlacement = "none"
    eps_clamps: Clamped | None = None
    reduction: Reduction = "unknown"
    weight_multiply: WeightMultiply = "none"
    axes: tuple[int, ...] = ()
    groups: int | None = None
    size: int | None = None
    batch_dependent: bool = False
    frozen: bool = False
    fused: bool = False
    weight: str | None = None
    bias: str | None = None
    device: str = "cpu"
    evidence: tuple[str, ...] = ()


class NormSite(NormSpec):
    """One norm of the model: a module (`module=True`), or one place in the graph with path `module.path#op:k`.

    `weight` and `bias` hold full parameter paths. `executions` counts the calls in one forward. `dtype` is that of the
    norm's input in the recorded forward ("float32"; empty where it never ran). `follows` is the path of a norm of the
    same elements whose output it reads, with no more than moves and constant factors between, where nothing else reads
    that output. `over_places` says whether the statistic is shared by places (tokens, pixels, samples of the batch), as
    the data flow tells what runs along `axes`; None where it does not. Where it is, `over_tokens` says whether tokens
    that causal attention keeps apart are among them; None where no attention is causal or it cannot be told.
    `unread` says that it ran and that nothing reads its result.
    `idle_beside` are, for a norm that never ran, other modules with parameters, and parameters, of the same module that
    were not used either.
    """

    path: str
    role: NormRole = "inner"
    dtype: str = ""
    executions: int = 0
    executed: bool = True
    module: bool = True
    follows: str | None = None
    bend: OpSite | None = None
    over_places: bool | None = None
    over_tokens: bool | None = None
    unread: bool = False
    idle_beside: tuple[str, ...] = ()
    class_name: str = Field(default="", alias="class")
