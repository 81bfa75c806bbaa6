"""NP214."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Outcome
from normprobe.records import Anatomy, Branch, Finding, NormSite, ReportData, Severity, Skipped, Stream


@final
@dataclass(frozen=True)
class NormAcrossTokens(Check):
    """Norm of a causal stream takes its statistic over tokens, and so lets earlier ones see later ones.

    ## What it measures

    What runs along the axes that the norms on a stream reduce, followed through the data flow from the product
    or the table that made the features, and whether the tokens of its attention run along one of them too. It is asked
    where every attention inside the stream is causal. Statistics over other places, such as the pixels of one frame
    where attention is causal in time, are none of its findings; those over the first axis are, as samples of one batch
    then change each other. Batch norms are left to their own checks, norms on queries and keys to NP210.

    ## Why it matters

    A causal model promises that a token depends on none that follows it. A statistic over the tokens breaks that in
    every layer: in training the next token is in part given away, the loss is too low, and in generation, where the
    later tokens are not there yet, the model computes something else than it was trained for. The result also changes
    with the length of the input and with padding. Nothing raises: a transposed axis has a gain of a fitting shape
    wherever it is broadcast.

    ## What to do

    Norm the axis of the features: the last one, or the one that a transposition put in its place.

    ## When to ignore it

    Never for a model that generates token by token.

    ## References

    Ba et al. 2016 (Layer Normalization), sec. 3: over the hidden units of a layer, for each case alone.
    """

    code, name, severity, since = "NP214", "norm-across-tokens", Severity.ERROR, "0.1.0"

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for all norms of causal streams whose statistic tokens share."""
        if not data.anatomy.norms:
            yield self.skip("no norm was found")
        paths = dict.fromkeys(p for s in data.anatomy.streams if _causal(s, data.anatomy) for p in _on(s))
        norms = [norm for norm in data.anatomy.norms if norm.path in paths and norm.kind != "batchnorm"]
        across = [norm for norm in norms if norm.over_places]
        tokens = [norm for norm in across if norm.over_tokens]
        samples = [norm for norm in across if norm.over_tokens is False and norm.batch_dependent]
        if tokens:
            yield self._found(tokens, "tokens", "each token depends on those that follow it")
        if samples:
            yield self._found(samples, "the samples of a batch", "what is computed of one depends on the others")
        yield from self._unknown(norms)

    def _found(self, across: list[NormSite], over: str, so: str) -> Finding:
        first = across[0]
        return self.finding(
            first.path,
            f"the statistic is taken over {over} (axes {first.axes} are reduced) in a causal stream: {so}",
            source="Ba et al. 2016, sec. 3",
            places=[norm.path for norm in across],
        )

    def _unknown(self, norms: list[NormSite]) -> Iterator[Skipped]:
        untold = [norm.path for norm in norms if norm.over_places is None and norm.axes not in ((), (-1,))]
        if untold:
            yield self.skip("it could not be told what runs along the axes that these norms reduce", untold)
        apart = [norm.path for norm in norms if norm.over_places and norm.over_tokens is None]
        if apart:
            why = "it could not be told whether the places that share their statistic are those of the causal attention"
            yield self.skip(why, apart)
        others = [n.path for n in norms if n.over_places and n.over_tokens is False and not n.batch_dependent]
        if others:
            yield self.skip("their statistic is shared by places along another axis than that of the attention", others)


def _causal(stream: Stream, anatomy: Anatomy) -> bool:
    """Whether all attention in the branches of a stream is causal, and there is some."""
    sites = [site for site in anatomy.attention if any(_within(site.path, b) for b in stream.branches)]
    return bool(sites) and all(site.causal and not site.cross for site in sites)


def _within(path: str, branch: Branch) -> bool:
    return branch.kind == "attention" and f"{path}.".startswith(f"{branch.block}.")


def _on(stream: Stream) -> list[str | None]:
    """The norms that a stream passes, and those at the ends of its branches."""
    ends = [norm for b in stream.branches for norm in (b.pre_norm, b.output_norm, b.post_norm)]
    return [stream.entry_norm, *ends, stream.final_norm]
