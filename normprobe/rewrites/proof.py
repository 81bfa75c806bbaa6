"""What a plan did to the outputs of the model on given inputs, and how much of that rounding can explain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.capture.invoke import Inputs
from normprobe.errors import RewriteError
from normprobe.records import Anatomy, Record
from normprobe.rewrites.agreement import next_tokens
from normprobe.rewrites.base import Effect
from normprobe.rewrites.choices import Choices, Given, Noted
from normprobe.rewrites.distance import distance, largest, not_finite, unproven
from normprobe.rewrites.ran import Ran, Running
from normprobe.rewrites.wider import wide_outputs, wider

_FLOAT64 = 1e-9  # of the largest output
# Of the largest output, where rounding could not be measured, and at most where it could: far above it, far below
# another function.
_UNKNOWN = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Spacings of the largest output that a rewrite may move one by, however near the original came to its wider copy: that
# distance is one draw of rounding, over few outputs perhaps, and can be small by chance or 0. Before and after, a
# weight that is edited, its product, and the sum that it goes into are rounded anew, by half a spacing each: 3 in all,
# and the largest output may have grown by one.
_SPACINGS = 4
_MANY = 0.25  # of all rows; rounding is seldom known to make other choices in more


class Proof(Record):
    """The outputs before and after, compared over all floating tensors that the model returns.

    Attributes:
        dtype: dtype of the first of them; differences are taken in float64.
        max_abs: max |after − before|; infinite where NaN or infinity meets anything but itself, NaN where all are
            NaN or infinite, before and after alike.
        max_rel: `max_abs` over max |before| of what is finite.
        kl: mean over tokens of KL(before ‖ after) in nats; None where no row of logits over a vocabulary is finite.
        agreement: share of tokens with the same most likely next token; None as above.
        tokens: number of tokens behind `kl` and `agreement`, those whose logits are finite before and after.
        loss: what the losses are; None where the inputs hold neither labels nor the tokens of logits, or one is NaN.
        loss_before: of the original model, in nats.
        loss_after: of the rewritten model.
        choices: rows of which the model chooses the largest or the order, as a router its experts; 0 where the rewrite
            changes outputs on purpose.
        choices_given: in how many of these the rewritten model chose others that are nearly as large, by rounding; it
            was run with the choice of the original there.
        rounding_before: max distance to the outputs of the original model in the next wider dtype.
        rounding_after: the same of the rewritten model.
        tolerance: largest `max_abs` that rounding explains; None where none could be derived or none applies.
        tolerance_source: where the tolerance comes from, or why there is none.
        holds: whether `max_abs` is within the tolerance; False where an exact rewrite made outputs NaN or infinite that
            were finite; else None where there is no tolerance.
        values: numbers of all outputs.
        not_finite_before: how many of them are NaN or infinite in the original model.
        not_finite_after: in the rewritten model.
        not_finite_new: of these, how many are finite in the original.
    """

    dtype: str
    max_abs: float
    max_rel: float
    kl: float | None = None
    agreement: float | None = None
    tokens: int = 0
    loss: str | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    choices: int = 0
    choices_given: int = 0
    rounding_before: float | None = None
    rounding_after: float | None = None
    tolerance: float | None = None
    tolerance_source: str = ""
    holds: bool | None = None
    values: int = 0
    not_finite_before: int = 0
    not_finite_after: int = 0
    not_finite_new: int = 0

    def refusal(self, names: str) -> RewriteError:
        """The error about rewrites whose proof does not hold."""
        expected, found = (
            f"max |Δ| <= {self.tolerance or 0:.3g}, {self.tolerance_source}",
            f"max |Δ| {self.max_abs:.3g}",
        )
        if self.tolerance is None:
            expected, found = "finite outputs where the original's are", self.tolerance_source
        return RewriteError(f"could not prove {names}; the model is as it was", expected=expected, found=found)

    def __str__(self) -> str:
        if isnan(self.max_abs):
            return f"nothing can be told: {self.tolerance_source}"
        text = f"max |Δ| {self.max_abs:.3g} ({self.max_rel:.3g} of the largest output, {self.dtype})"
        if self.kl is not None and self.agreement is not None:
            text += f", KL {self.kl:.3g} nat, same next token {self.agreement:.1%} of {self.tokens}"
        if self.loss is not None:
            text += f", loss {self.loss_before:.4g} -> {self.loss_after:.4g} ({self.loss})"
        if self.choices_given:
            text += f", given the original's choice where rounding made another in {self.choices_given} of"
            text += f" {self.choices} rows (top-k, sort, max)"
        if self.not_finite_before or self.not_finite_after:
            text += f", NaN or infinite in {self.not_finite_after:,} of {self.values:,} values"
            text += f" (in the original {self.not_finite_before:,})"
        if self.tolerance is None:
            told = "refused" if self.holds is False else "no verdict" if self.not_finite_before else "no tolerance"
            return f"{text}; {told}: {self.tolerance_source}"
        verdict = "within" if self.holds else "beyond"
        return f"{text}; {verdict} the tolerance {self.tolerance:.3g}: {self.tolerance_source}"


@dataclass(frozen=True)
class Baseline:
    """The outputs of the model before a rewrite, and those of a copy in the next wider dtype where one was made, given
    the same choices: `off` by how much the values differ that these were made by."""

    ran: Ran
    anatomy: Anatomy
    choices: Choices
    wide: list[Tensor] | None = None
    wider: str = ""
    off: tuple[float, ...] = ()
    why_not_wide: str = ""
    widest: bool = False
    exact: bool = True

    @classmethod
    def of(
        cls,
        model: nn.Module,
        inputs: Inputs,
        effect: Effect,
        anatomy: Anatomy,
        room: int | None = None,
        before: Running[Noted] | None = None,
    ) -> Baseline:
        """Run `model`, unless it ran `before`; for an exact rewrite also a copy of it in the next wider dtype, if it
        fits into `room` bytes.

        `anatomy` of the original model says which loss its outputs have.
        """
        before = before or Running(Noted).alone(model, inputs)
        ran, choices = Ran.of(model, before, inputs, anatomy), before.mode.choices
        made = partial(cls, ran, anatomy, choices)
        if effect is not Effect.EXACT:
            return made(why_not_wide=f"a {effect.value} rewrite changes the outputs on purpose", exact=False)
        if all(t.dtype is torch.float64 for t in ran.outputs):
            return made(widest=True)
        size = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
        if room is not None and size > room:
            return made(why_not_wide=f"a wider copy takes {size:,} bytes, more than there is room for")
        given = choices.given(_share(ran))
        wide = wide_outputs(model, inputs, anatomy, given)
        if isinstance(wide, str):
            return made(why_not_wide=f"no wider copy runs: {wide}")
        if not _alike(wide, ran.outputs):
            return made(why_not_wide="a wider copy returns other shapes")
        return made(wide, str(wider(model))[6:], tuple(given.off))

    def rewritten(self) -> Running[Given]:
        """What the rewritten model has to run in: for an exact rewrite it is given the original's choices."""
        least = _SPACINGS * min(torch.finfo(t.dtype).eps for t in self.ran.outputs)
        choices = self.choices if self.exact else Choices()
        return Running(lambda: choices.given(_share(self.ran), least, self.off))

    def compare(self, model: nn.Module, inputs: Inputs, after: Running[Given] | None = None) -> Proof:
        """Compare with the rewritten model, which runs now unless it ran in `rewritten` already.

        Raises:
            RewriteError: it returns other tensors than before.
        """
        after = after or self.rewritten().alone(model, inputs)
        ran, given, before = Ran.of(model, after, inputs, self.anatomy), after.mode, self.ran.outputs
        if not _alike(ran.outputs, before):
            raise RewriteError(
                "the rewritten model returns other tensors",
                expected=", ".join(str(tuple(t.shape)) for t in before),
                found=", ".join(str(tuple(t.shape)) for t in ran.outputs),
            )
        change, most, broken = distance(ran.outputs, before), largest(before), not_finite(before, ran.outputs)
        facts = self._rounding(ran.outputs) | broken | _losses(self.ran, ran)
        integers = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) and not t.dtype.is_floating_point]
        return Proof(
            dtype=str(before[0].dtype)[6:],
            max_abs=change,
            max_rel=change if change == 0 or isnan(change) else change / most if most else inf,
            choices=given.rows,
            choices_given=given.kept,
            **facts,
            **(unproven(broken, change, self.exact) or self._tolerance(change, most, given)),
            **next_tokens(self.ran.main, ran.main, tuple(tuple(t.shape) for t in integers)),
        )

    def _rounding(self, after: list[Tensor]) -> dict[str, Any]:
        if self.wide is None:
            return {}
        before = distance(self.ran.outputs, self.wide)
        return {"rounding_before": before, "rounding_after": distance(after, self.wide)}

    def _tolerance(self, change: float, most: float, given: Given) -> dict[str, Any]:
        """Twice the original's own rounding error, what two models as far as that from the wide one can differ by, or a
        choice where it could not be measured; none where that may be no rounding which was set aside."""
        if self.widest:
            tolerance, source = _FLOAT64 * most, f"choice: {_FLOAT64:g} of the largest output in float64"
        elif self.wide is None and not self.exact:
            return {"tolerance_source": self.why_not_wide}
        elif self.wide is None and given.kept > _MANY * given.rows:
            why = f"it chose otherwise in {given.kept} of {given.rows} rows, too many to take for rounding unmeasured"
            return {"tolerance_source": f"{why}; {self.why_not_wide}"}
        elif self.wide is None:
            tolerance, source = self._chosen(most, self.why_not_wide)
        else:
            tolerance, source = self._measured(most)
        return {"tolerance": tolerance, "tolerance_source": source, "holds": change <= tolerance}

    def _chosen(self, most: float, why: str) -> tuple[float, str]:
        share, own = _share(self.ran), str(self.ran.outputs[0].dtype)[6:]
        return share * most, f"choice: {share:g} of the largest output in {own}; {why}"

    def _measured(self, most: float) -> tuple[float, str]:
        """Twice the distance to the wider copy, or a few spacings of the largest output where these are more; a choice
        where it is more than that: the copy may compute something else."""
        assert self.wide is not None
        floor = _SPACINGS * most * min(torch.finfo(t.dtype).eps for t in self.ran.outputs)
        measured, dtype = 2 * distance(self.ran.outputs, self.wide), str(self.wide[0].dtype)[6:]
        source = f"twice the original's own distance to a {self.wider} copy of it on these inputs"
        source += "" if dtype == self.wider else f", whose outputs are {dtype}"
        chosen = self._chosen(most, f"less than {source} ({measured:.3g})")
        if not measured <= chosen[0]:
            return chosen
        if floor <= measured:
            return measured, source
        return floor, f"{_SPACINGS} spacings of the largest output, more than {source} ({measured:.3g})"


def _share(ran: Ran) -> float:
    """What is far above rounding and far below another function, of the largest number."""
    own = ran.outputs[0].dtype
    return _FLOAT64 if own is torch.float64 else _UNKNOWN.get(own, _UNKNOWN[torch.float32])


def _losses(before: Ran, after: Ran) -> dict[str, Any]:
    if before.loss is None or after.loss is None or not isfinite(before.loss[0]) or not isfinite(after.loss[0]):
        return {}
    return {"loss": before.loss[1], "loss_before": before.loss[0], "loss_after": after.loss[0]}


def _alike(a: list[Tensor], b: list[Tensor]) -> bool:
    return [t.shape for t in a] == [t.shape for t in b]
