"""What equal outputs do not show: other values that they do not hang on, and facts that act on other inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from normprobe.diffing.facts import ERROR, difference
from normprobe.diffing.values import Apart, Names
from normprobe.records import Skipped
from normprobe.records.diff import Difference, SignalDiff, WeightPair
from normprobe.report.wording import plural, verb

ELSEWHERE = frozenset({"eps", "eps_placement", "softcap", "window", "causal", "sinks", "activation", "batch_dependent"})
HIDDEN = "for these inputs the output that is compared, the first, does not hang on them"
_OTHER = ("different", "scaled", "reordered")
_MOST = 3  # names in a skip


def output_parts(signal: SignalDiff) -> bool | None:
    """Whether the outputs part; None where that is not known."""
    return next((site.step for site in signal.sites if site.kind == "output"), None)


def same_outputs(signal: SignalDiff | None) -> bool:
    """Whether the outputs were compared and do not part."""
    return signal is not None and output_parts(signal) is False


def doubtful(found: Iterable[Difference], weights: Iterable[WeightPair], signal: SignalDiff | None) -> bool:
    """Whether outputs are the same although something is not, so that one has to ask whether they hang on it."""
    facts = any(one.severity is ERROR and one.fact not in ELSEWHERE for one in found)
    return same_outputs(signal) and (facts or any(pair.relation in _OTHER for pair in weights))


def hidden_facts(
    weights: Sequence[WeightPair], apart: Mapping[tuple[Names, Names], Apart], formed: bool
) -> Iterator[Difference | Skipped]:
    """Weights of other values where the outputs are the same, and hang on none of these values.

    An error where all that the outputs hang on is as it was: the form is the same, and other inputs tell the models
    apart. Not known where the form is another one (experts in another order, another basis of the features): other
    values may belong to it.

    Args:
        weights: all that were compared.
        apart: where their values are apart.
        formed: whether facts of the build are of another form.
    """
    hidden = hidden_weights(weights, apart)
    if not hidden:
        return
    if formed or any(pair.relation in (*_OTHER, "unlike") and pair not in hidden for pair in weights):
        names = ", ".join(" + ".join(pair.a) for pair in hidden[:_MOST])
        more = f" and {len(hidden) - _MOST} more" if len(hidden) > _MOST else ""
        why = f"they hold other values, and {HIDDEN}; the form is another one too, so that they may be the same"
        yield Skipped(what=f"weights {names}{more}", why=why)
        return
    where = tuple((" + ".join(pair.a), " + ".join(pair.b)) for pair in hidden)
    count = sum(apart[pair.a, pair.b].unreached for pair in hidden)
    told = f"{plural(len(hidden), 'weight')} of {len(weights)} {verb('hold', len(hidden))}"
    message = f"{told} {plural(count, 'other value')}; {HIDDEN}"
    first = difference("weights", "unreached_values", ERROR, (None, None), where[0], message)
    yield first.model_copy(update={"where": where})


def hidden_weights(weights: Sequence[WeightPair], apart: Mapping[tuple[Names, Names], Apart]) -> list[WeightPair]:
    """Weights with other values of which the output hangs on none."""
    held = [(pair, apart.get((pair.a, pair.b))) for pair in weights if pair.relation in _OTHER]
    return [pair for pair, at in held if at is not None and at.unreached and not at.reached]
