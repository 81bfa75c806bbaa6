"""Values through views and in-place writes, and tensors whose Python ids are used again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from normprobe.capture.recorder import record
from normprobe.capture.storage import ValueTable
from tests.capture.flow import output_sources

SIZE = 6


class Net(nn.Module):
    """Parameters p0, p1, … of `SIZE` elements, and a forward given as a function."""

    def __init__(self, forward: object, parameters: int = 3) -> None:
        super().__init__()
        self.body = forward
        for i in range(parameters):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(SIZE)))

    def forward(self, x: Tensor) -> object:
        return self.body(self, x)


def origins(forward: object) -> dict[str, set[str]]:
    return output_sources(record(Net(forward), torch.zeros(SIZE)))


def test_write_in_place() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = x * 2
        y.add_(net.p0)
        return y

    assert origins(forward) == {"output": {"0", "p0"}}


def test_write_through_a_view_is_seen_by_its_base() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = x * 2
        y[:3].add_(net.p0[:3])
        return y

    assert origins(forward) == {"output": {"0", "p0"}}


def test_write_to_the_base_is_seen_by_an_older_view() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = x * 2
        view = y.view(2, 3)
        y.mul_(net.p0)
        return view

    assert origins(forward) == {"output": {"0", "p0"}}


def test_write_through_another_view_of_the_same_memory() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = x * 2
        one, other = y.view(2, 3), y.view(3, 2)
        one[0].copy_(net.p0[:3])
        return other

    assert origins(forward) == {"output": {"0", "p0"}}


def test_disjoint_halves_do_not_see_each_other() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2
        left, right = y[:3], y[3:]
        left.add_(net.p0[:3])
        right.add_(net.p1[3:])
        return left, right, y

    assert origins(forward) == {"0": {"0", "p0"}, "1": {"0", "p1"}, "2": {"0", "p0", "p1"}}


def test_filling_a_fresh_tensor_column_by_column() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        out = torch.empty(2, 3)
        for i in range(3):
            out[:, i] = getattr(net, f"p{i}")[:2]
        return out

    assert origins(forward) == {"output": {"p0", "p1", "p2"}}


def test_value_read_before_a_write_is_the_old_one() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        before = y + net.p1
        y.add_(net.p0)
        return before, y + net.p2

    assert origins(forward) == {"0": {"0", "p1"}, "1": {"0", "p0", "p2"}}


def test_copy_does_not_follow_its_original() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        copy = y.clone()
        y.add_(net.p0)
        return copy, y

    assert origins(forward) == {"0": {"0"}, "1": {"0", "p0"}}


def test_write_by_an_out_argument() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = torch.zeros(SIZE)
        torch.add(x, net.p0, out=y)
        return y

    assert origins(forward) == {"output": {"0", "p0"}}


def test_list_written_by_one_foreach_operation() -> None:
    def forward(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = x * 2, x * 3
        torch._foreach_add_([one, other], [net.p0.detach(), net.p1.detach()])
        return one, other

    found = origins(forward)
    assert found["0"] >= {"0", "p0"}
    assert found["1"] >= {"0", "p1"}


def test_ids_used_again() -> None:
    """Short-lived tensors get each other's Python ids; none may be taken for another."""
    ids: list[int] = []

    def forward(net: Net, x: Tensor) -> list[Tensor]:
        kept = []
        for i in range(30):
            gone = x * net.p0
            ids.append(id(gone))
            del gone
            fresh = getattr(net, f"p{i % 3}") * 1.0
            ids.append(id(fresh))
            kept.append(fresh + 0.0)
        return kept

    found = origins(forward)
    assert len(set(ids)) < len(ids)  # otherwise this test has shown nothing
    assert [found[str(i)] for i in range(30)] == [{f"p{i % 3}"} for i in range(30)]


WRITE = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)).map(lambda w: (w[0], min(SIZE, w[0] + w[1])))


@settings(max_examples=60)
@given(writes=st.lists(WRITE, max_size=6), reads=st.lists(WRITE, min_size=1, max_size=4))
def test_older_views_see_exactly_the_writes_that_overlap_them(
    writes: list[tuple[int, int]], reads: list[tuple[int, int]]
) -> None:
    """Against the plain definition: a slice depends on the writes whose elements it shares."""

    def forward(net: Net, x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        targets, views = [y[a:b] for a, b in writes], [y[a:b] for a, b in reads]
        for i, (target, (a, b)) in enumerate(zip(targets, writes, strict=True)):
            target += getattr(net, f"p{i}")[a:b]
        return tuple(view * 1.0 for view in views)

    found = output_sources(record(Net(forward, parameters=len(writes)), torch.zeros(SIZE)))
    for k, (start, stop) in enumerate(reads):
        overlapping = [i for i, (a, b) in enumerate(writes) if a < stop and start < b]
        direct = {f"p{i}" for i in overlapping}
        assert direct <= found[str(k)]
        assert found[str(k)] <= {"0"} | reached(writes, overlapping)


def reached(writes: list[tuple[int, int]], last: list[int]) -> set[str]:
    """Parameters of the given writes and of all earlier ones that they overlap: a written value holds those too."""
    found, todo = set(last), list(last)
    while todo:
        i = todo.pop()
        earlier = [j for j in range(i) if writes[j][0] < writes[i][1] and writes[i][0] < writes[j][1]]
        todo += [j for j in earlier if j not in found]
        found.update(earlier)
    return {f"p{i}" for i in found}


# ---- the table alone


def test_table_forgets_a_tensor_that_is_gone() -> None:
    table, tensor = ValueTable(), torch.zeros(2)
    table.bind(tensor, 7)
    key, impostors = id(tensor), []
    assert table.get(tensor) == 7
    del tensor
    while not any(id(t) == key for t in impostors) and len(impostors) < 10_000:
        impostors.append(torch.zeros(2))
    assert id(impostors[-1]) == key  # otherwise this test has shown nothing
    assert table.get(impostors[-1]) is None


def test_table_takes_identity_not_equality() -> None:
    table, tensor = ValueTable(), torch.zeros(2)
    table.bind(tensor, 7)
    assert table.get(tensor.view(2)) is None
    assert table.get(torch.zeros(2)) is None


@pytest.mark.parametrize(
    ("view", "seen"),
    [
        (lambda y: y[0], True),
        (lambda y: y[1], False),
        (lambda y: y[:, 1:], True),
        (lambda y: y.t(), True),
        (lambda y: y[:0], False),
    ],
)
def test_writes_by_region(view: object, seen: bool) -> None:
    table, y = ValueTable(), torch.zeros(2, 3)
    other = view(y)
    table.wrote(y[0], 5)
    assert table.later_writes(other, 3) == ([5] if seen else [])
    assert table.later_writes(other, 6) == []


def test_tensor_without_storage_is_no_error() -> None:
    table, sparse = ValueTable(), torch.eye(2).to_sparse()
    table.wrote(sparse, 1)
    table.wrote(torch.zeros(2), 2)
    assert table.get(sparse) == 1
    assert table.later_writes(sparse, 0) == []
