"""NP201 with an idle norm, NP202 and NP203: the end of a stream."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests import models
from tests.checks import builders as b
from tests.checks.placement.planted import (
    PRE,
    anatomy,
    codes,
    final_norm,
    found,
    judge,
    last_block,
    norm_before,
    replace,
    twin,
)

ENDED = b.stream(final_norm="norm")


class Twice(nn.Module):
    """A norm that is called twice in a row."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Any) -> Any:
        return self.norm(self.norm(x))


@pytest.mark.parametrize("name", PRE)
def test_np202_finds_a_final_norm_that_is_doubled(name: str) -> None:
    model, inputs = PRE[name]()
    path = final_norm(model, inputs)
    replace(model, path, nn.Sequential(model.get_submodule(path), twin(model, path)))
    (finding,) = found("NP202", model, inputs)
    assert (finding.where, finding.value, finding.severity.value) == (f"{path}.1", f"{path}.0", "warning")
    assert codes(model, inputs) == {"NP202"}


@pytest.mark.parametrize("name", ["llama", "gpt2", "by hand"])
def test_np202_finds_a_final_norm_that_is_called_twice(name: str) -> None:
    model, inputs = PRE[name]()
    path = final_norm(model, inputs)
    replace(model, path, Twice(model.get_submodule(path)))
    (finding,) = found("NP202", model, inputs)
    assert finding.where == finding.value == f"{path}.norm"
    assert finding.severity.value == "warning"
    assert "again: it is called twice, and nothing lies between the two" in finding.message


def test_np202_notes_a_final_norm_behind_post_norm_blocks() -> None:
    model, inputs = models.torch_encoder(norm_first=False, final=True)
    (finding,) = found("NP202", model, inputs)
    assert (finding.where, finding.value, finding.severity.value) == (
        "norm",
        f"layers.{models.LAYERS - 1}.norm2",
        "note",
    )
    assert "the last block is post-norm and ends in layers.1.norm2" in finding.message


@pytest.mark.parametrize(("norm_first", "final"), [(True, True), (False, False)])
def test_np202_is_silent_on_one_norm(norm_first: bool, final: bool) -> None:
    assert found("NP202", *models.torch_encoder(norm_first, final)) == ()


@pytest.mark.parametrize("name", PRE)
def test_np203_finds_a_final_norm_before_the_last_block(name: str) -> None:
    model, inputs = PRE[name]()
    path, block = final_norm(model, inputs), last_block(model, inputs)
    norm = model.get_submodule(path)
    replace(model, path, nn.Identity())
    norm_before(block, norm)
    (finding,) = found("NP203", model, inputs)
    assert (finding.value, finding.severity.value) == (2.0, "error")
    assert finding.where.endswith("planted")
    assert codes(model, inputs) == {"NP203"}


def test_np203_counts_the_writes_behind_the_norm_and_says_who_reads_them() -> None:
    writes = [b.branch(f"blocks.{i}") for i in range(4)]
    writes[2] = b.branch("blocks.2", placement="post", post_norm="norm")
    data = b.document(streams=(b.stream(branches=tuple(writes), depth=4, final_norm=None, placement="mixed"),))
    (finding,), _ = judge("NP203", data)
    assert finding.message == (
        "norms the stream blocks before its last 1 write instead of behind them; the head reads the raw stream"
    )
    assert judge("NP201", data) == ((), ())


@pytest.mark.parametrize(
    "stream",
    [
        ENDED,
        b.stream(final_norm=None, needs_final_norm=None, final_norm_reason="features"),
        b.stream(final_norm=None, needs_final_norm=False, placement="post"),
        b.stream(final_norm=None),  # missing, not misplaced
    ],
)
def test_np203_is_silent(stream: Any) -> None:
    assert judge("NP203", b.document(streams=(stream,))) == ((), ())


@pytest.mark.parametrize("name", ["llama", "gpt2", "by hand"])
def test_np201_names_the_norm_that_was_built_and_is_not_called(name: str) -> None:
    model, inputs = PRE[name]()
    path = final_norm(model, inputs)
    norm = model.get_submodule(path)
    replace(model, path, nn.Identity())
    model.add_module("forgotten", norm)
    (finding,) = found("NP201", model, inputs)
    assert "; forgotten was built for it, as it seems, and is not called (NP208)" in finding.message
    assert codes(model, inputs) == {"NP201", "NP208"}


def test_np201_names_no_norm_inside_a_block_or_of_another_width() -> None:
    idle = {"role": "unused", "executed": False, "executions": 0, "size": 8}
    lost = b.stream(final_norm=None, widths=(8,))
    for path, size, named in (("norm", 8, True), ("blocks.0.norm", 8, False), ("norm", 4, False)):
        data = b.document(norms=(b.norm(path, **idle | {"size": size}),), streams=(lost,))
        (finding,), _ = judge("NP201", data)
        assert ("was built for it" in finding.message) is named


def test_follows_needs_the_same_elements_and_no_other_reader() -> None:
    model, inputs = models.bert()
    assert {norm.follows for norm in anatomy(model, inputs).norms} == {None}
