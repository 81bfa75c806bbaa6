"""Memory that tensors are given again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from normprobe.rewrites.recycled import Recycled

CPU = torch.device("cpu")
MANY = torch.Size([1 << 10, 1 << 11])  # 8 MB in float32


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_memory_is_taken_back_once_nothing_refers_to_it() -> None:
    memory = Recycled()
    first = memory.empty(MANY, torch.float32, CPU)
    part, where = first.view(-1)[7:9].fill_(3.0), place(first)
    del first
    second = memory.empty(MANY, torch.float32, CPU).zero_()
    assert place(second) != where, "a part of the first is in use"
    assert part.tolist() == [3.0, 3.0]
    del part
    third = memory.empty(torch.Size([1 << 21]), torch.bfloat16, CPU)
    assert place(third) == where
    assert (third.shape, third.dtype, third.is_contiguous()) == ((1 << 21,), torch.bfloat16, True)
    assert bool((second == 0).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_it_is_what_torch_would_give(dtype: torch.dtype) -> None:
    tensor = Recycled().empty(MANY, dtype, CPU)
    assert (tensor.shape, tensor.dtype, tensor.device, tensor.stride()) == (MANY, dtype, CPU, (MANY[1], 1))
    assert tensor.data_ptr() % 64 == 0


def test_small_tensors_and_those_elsewhere_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("normprobe.rewrites.recycled.np")
    memory = Recycled()
    assert memory.empty(torch.Size([]), torch.float32, CPU).shape == ()
    assert memory.empty(torch.Size([0, 3]), torch.float32, CPU).shape == (0, 3)
    assert memory.empty(MANY, torch.float32, torch.device("meta")).is_meta


def test_of_what_is_spare_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normprobe.rewrites.recycled._MOST", 5 * (1 << 22))
    memory = Recycled()
    tensors: list[Any] = [memory.empty(torch.Size([n << 20]), torch.float32, CPU) for n in (1, 2, 1, 2)]
    large = {place(tensors[1]), place(tensors[3])}
    while tensors:
        tensors.pop()
    kept = [memory.empty(torch.Size([1 << 20]), torch.float32, CPU) for _ in range(2)]
    assert {place(each) for each in kept} <= large


def test_what_another_thread_gives_back_is_given_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever refers to a tensor last gives its memory back, while others may ask for some."""
    memory, size, amid, on = Recycled(), torch.Size([1 << 20]), threading.Event(), threading.Event()
    spare, other = [memory.empty(size, torch.float32, CPU) for _ in range(2)]
    del spare

    def slow(each: Iterable[Any], key: Callable[[Any], int]) -> list[Any]:
        found = sorted(each, key=key)
        amid.set()
        on.wait(0.2)
        return found

    held = [other]
    del other
    with monkeypatch.context() as patched:
        patched.setattr("normprobe.rewrites.recycled.sorted", slow, raising=False)
        giving = threading.Thread(target=held.clear)
        giving.start()
        amid.wait()
        taken = [memory.empty(size, torch.float32, CPU)]
        on.set()
        giving.join()
    taken += [memory.empty(size, torch.float32, CPU) for _ in range(2)]
    assert len({place(each) for each in taken}) == 3
