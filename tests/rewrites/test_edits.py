"""Values written in place, and taken back bit for bit."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import Tensor, nn

from normprobe.errors import RewriteError
from normprobe.rewrites.edits import PART, ForGood, Parts, bytes_of, chosen, parts_of, set_values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_are_written_in_place_and_taken_back_bit_for_bit(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(3, 4).to(dtype))
    weight.data[0, 0] = float("nan")
    before, place = weight.detach().clone(), weight.data_ptr()
    with ExitStack() as undo:
        set_values(weight, torch.full((3, 4), 0.5, dtype=torch.float64), undo)
        assert weight.data_ptr() == place
        assert weight.dtype is dtype
        assert weight.requires_grad
        assert bool((weight == 0.5).all())
    assert torch.equal(weight.detach().view(torch.uint8), before.view(torch.uint8))


def test_other_shapes_and_values_that_overflow_are_refused_and_nothing_is_written() -> None:
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float16))
    with ExitStack() as undo, pytest.raises(RewriteError, match=r"shape \(2, 2\)"):
        set_values(weight, torch.ones(4), undo)
    with ExitStack() as undo, pytest.raises(RewriteError, match=r"up to 6\.55e\+04"):
        set_values(weight, torch.full((2, 2), 1e6), undo)
    assert bool((weight == 1).all())


def test_tied_parameters_are_held_once() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    assert bytes_of(model, ("0.weight", "1.weight")) == 5 * 4 * 4


@pytest.mark.parametrize(
    ("only", "meant"),
    [(None, True), ("h.*.mlp", True), ("h.1.mlp", False), (("h.9.mlp", "h.0.*"), True), ("H.*", False), ((), False)],
)
def test_a_pattern_chooses_paths(only: str | tuple[str, ...] | None, meant: bool) -> None:
    assert chosen("h.0.mlp", only) is meant


@pytest.mark.parametrize("count", [0, 1, PART, PART + 1, 3 * PART - 1])
def test_parts_are_all_values_in_order(count: int) -> None:
    tensor = torch.arange(2 * count)[::2]
    parts = list(parts_of(tensor))
    assert torch.equal(torch.cat([*parts, torch.tensor([], dtype=tensor.dtype)]), tensor.reshape(-1))
    assert all(len(part) <= PART for part in parts)


def test_values_come_in_parts_and_nothing_is_written_before_all_are_there() -> None:
    def parts(*sizes: int, value: float = 1.0) -> Parts:
        made = {4 * n: torch.full((size,), value * (n + 1), dtype=torch.float64) for n, size in enumerate(sizes)}
        return Parts(4, made.__getitem__)

    weight = nn.Parameter(torch.zeros(5, 2, dtype=torch.float16))
    with ExitStack() as undo:
        set_values(weight, parts(4, 4, 2), undo)
        assert weight.detach().reshape(-1).tolist() == [1.0] * 4 + [2.0] * 4 + [3.0] * 2
    assert bool((weight == 0).all())
    for made, why in (
        (parts(4, 3, 2), "4 values from 4 on.*3"),
        (parts(4, 4, 4), "2 values from 8 on.*4"),
        (parts(4, 4, 2, value=4e4), r"up to 6\.55e\+04.*8e\+04"),
    ):
        with ExitStack() as undo, pytest.raises(RewriteError, match=re.compile(why, re.DOTALL)):
            set_values(weight, made, undo)
        assert bool((weight == 0).all())


BLOCK = 1 << 18  # elements that a thread takes at a time
COUNT = 5 * BLOCK + 7


@contextmanager
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("made_inside", [True, False])
@pytest.mark.parametrize("undone", [True, False])
def test_in_inference_mode_threads_write_too(made_inside: bool, undone: bool) -> None:
    with torch.inference_mode(made_inside):
        weight = nn.Parameter(torch.zeros(COUNT))
    with torch.inference_mode(), two_threads(), ExitStack() if undone else ForGood() as undo:
        set_values(weight, torch.full((COUNT,), 3.0), undo)
        assert bool((weight == 3).all())


def test_threads_write_what_one_writes_and_torch_has_its_threads_back() -> None:
    values, weight = torch.randn(COUNT, dtype=torch.float64), nn.Parameter(torch.empty(COUNT))
    seen, both = set(), threading.Barrier(2, timeout=60)

    def part(start: int) -> Tensor:
        if start in (0, BLOCK):
            both.wait()  # so that no thread does all
        seen.add((threading.get_ident(), torch.get_num_threads()))
        return values[start : start + 1024]

    with two_threads(), ForGood() as undo:
        set_values(weight, Parts(1024, part), undo)
        assert torch.get_num_threads() == 2
    assert torch.equal(weight, values.float())
    assert len(seen) == 2
    assert {threads for _, threads in seen} == {1}


def test_what_was_infinite_may_stay_so() -> None:
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    with ExitStack() as undo:
        set_values(weight, torch.tensor([float("inf"), float("nan"), 1.0, -float("inf")], dtype=torch.float64), undo)
        assert weight.isfinite().tolist() == [False, False, True, False]


def test_for_good_the_memory_that_it_had_is_left_alone() -> None:
    """It may be mapped from a file: each page that is written to would be copied, and stay."""
    held = torch.ones(3, 4)
    weight = nn.Parameter(held)
    with ForGood() as undo:
        set_values(weight, torch.full((3, 4), 2.0), undo)
    assert bool((weight == 2).all())
    assert weight.is_leaf
    assert weight.requires_grad
    assert bool((held == 1).all())
