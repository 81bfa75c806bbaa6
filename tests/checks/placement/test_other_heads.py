"""NP201 for a second head that reads the raw stream beside a head that reads it through a norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from tests import models
from tests.checks import builders as b
from tests.checks.placement.planted import PRE, anatomy, final_norm, found, judge

Second = Callable[[nn.Module, Tensor], Tensor]


class Value(nn.Module):
    """A value head, of one layer and of two."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Linear(models.WIDTH, 1)
        self.deep = nn.Sequential(nn.Linear(models.WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
        self.norm = nn.LayerNorm(models.WIDTH)
        self.lookup = nn.Linear(models.WIDTH, 5)


class Both(nn.Module):
    """A model, and what `second` makes of the stream before its final norm."""

    def __init__(self, model: nn.Module, norm: str, second: Second) -> None:
        super().__init__()
        self.model, self.value, self.second = model, Value(), second
        self.kept: list[Tensor] = []
        model.get_submodule(norm).register_forward_pre_hook(lambda _, args: self.kept.append(args[0]))

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, Tensor]:
        self.kept.clear()
        out = self.model(*args, **kwargs)
        logits = out if isinstance(out, Tensor) else out.logits
        return logits, self.second(self.value, self.kept.pop())


def given(name: str, second: Second) -> tuple[nn.Module, object]:
    model, inputs = PRE[name]()
    return Both(model, final_norm(model, inputs), second).eval(), inputs


RAW: list[Second] = [
    lambda v, x: v.flat(x),
    lambda v, x: v.flat(x[:, -1]).squeeze(-1).tanh(),
    lambda v, x: v.deep(x.mean(1)),
]
SOUND: list[Second] = [
    lambda v, x: x,
    lambda v, x: x.mean(1),
    lambda v, x: v.flat(v.norm(x)),
    lambda v, x: v.norm(v.lookup(x) @ v.lookup.weight),  # normed behind weights
]


@pytest.mark.parametrize("name", ["gpt2", "llama", "by hand"])
@pytest.mark.parametrize("second", RAW)
def test_a_second_head_on_the_raw_stream_is_found(name: str, second: Second) -> None:
    model, inputs = given(name, second)
    (finding,) = found("NP201", model, inputs)
    assert (finding.severity.value, finding.about) == ("warning", "another head")
    assert "an output is made of the raw stream by value." in finding.message


@pytest.mark.parametrize("second", SOUND)
def test_features_and_heads_behind_a_norm_are_silent(second: Second) -> None:
    model, inputs = given("gpt2", second)
    assert found("NP201", model, inputs) == ()
    assert [s.raw_heads for s in anatomy(model, inputs).streams] == [()]


def test_where_no_head_is_normed_the_missing_norm_is_the_one_finding() -> None:
    two = b.stream(final_norm=None, raw_heads=("value",))
    (finding,), _ = judge("NP201", b.document(streams=(two,)))
    assert (finding.severity.value, finding.about) == ("error", "")
