"""Values on the meta device: inputs and constants decide some, the rest is assumed and said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.capture.recorder import record
from normprobe.capture.trace import Trace
from tests.capture.flow import calls, ops, output_sources

IDS = torch.tensor([[3, 0, 5, 0], [0, 0, 7, 1]])


class Net(nn.Module):
    """An embedding, a layer and a buffer; the forward is given as a function of the module and the ids."""

    def __init__(self, forward: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.table, self.a, self.body = nn.Embedding(8, 4), nn.Linear(4, 4), forward
        self.register_buffer("count", torch.tensor(3))

    def forward(self, ids: Tensor) -> Any:
        return self.body(self, ids)


def recorded(forward: Callable[[Net, Tensor], Any], *, device: str = "meta") -> Trace:
    return record(Net(forward).to(device), IDS)


def shapes(trace: Trace) -> list[tuple[int, ...]]:
    return [trace.values[value].shape for _, value in trace.outputs]


@pytest.mark.parametrize(
    "forward",
    [
        lambda net, ids: net.table(ids[ids > 0]),
        lambda net, ids: net.table(torch.masked_select(ids, ids > 2)),
        lambda net, ids: net.table(ids)[ids == 0],
        lambda net, ids: net.table(ids[:, : int((ids > 0).sum(-1).max())]),
        lambda net, ids: net.table(ids).split((ids > 0).sum(-1).tolist(), 1)[0],
        lambda net, ids: net.table(ids) if bool((ids < 0).any()) else net.table(ids[:1]),
        lambda net, ids: net.table(torch.arange(2).expand(2, 2)),  # made on the CPU, read on meta
        lambda net, ids: net.table(torch.unique(ids)),
        lambda net, ids: net.table(torch.arange(4, device=ids.device)[torch.nonzero(ids[0])[:, 0]]),
        lambda net, ids: net.table(ids.clone().masked_fill_(ids == 0, 7)[ids > 6]),
    ],
)
def test_what_inputs_decide_is_as_with_values(forward: Callable[[Net, Tensor], Any]) -> None:
    bare, real = recorded(forward), recorded(forward, device="cpu")
    assert shapes(bare) == shapes(real)
    assert output_sources(bare) == output_sources(real)
    assert bare.notes == []


def test_unknown_values_are_ones_and_said() -> None:
    def forward(net: Net, ids: Tensor) -> Tensor:
        scores = net.a(net.table(ids))
        chosen = torch.nonzero(scores[0] > 0)
        return scores[0][chosen[:, 0], chosen[:, 1]] * int(net.count)

    trace = recorded(forward)
    assert shapes(trace) == [(16,)]
    assert trace.notes == [
        "the meta device holds no values: . ran aten.nonzero.default on some, ones were assumed",
        "the meta device holds no values: . read one, 1 was assumed",
    ]


def test_an_assumed_index_is_known_from_then_on() -> None:
    """A loop over the experts that were hit, each told by its number."""

    def forward(net: Net, ids: Tensor) -> Tensor:
        hit = (net.a(net.table(ids)).sum((0, 1)) > 0).nonzero()
        seen.extend(int(i) for i in hit)
        return net.table(ids)

    seen: list[int] = []
    recorded(forward)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("view", [False, True])
def test_something_unknown_written_into_a_known_tensor_makes_it_unknown(view: bool) -> None:
    def forward(net: Net, ids: Tensor) -> Tensor:
        known = torch.zeros(4, device=ids.device)
        (known[:] if view else known).copy_(net.a(net.table(ids))[0, 0])
        return net.table(ids) * float(known.sum())

    assert "read one, 1.0 was assumed" in recorded(forward).notes[0]


def test_a_random_draw_is_unknown() -> None:
    trace = recorded(lambda net, ids: net.table(ids) * torch.rand((), device=ids.device).item())
    assert "read one" in trace.notes[0]


def test_inputs_on_meta_have_no_values() -> None:
    model = Net(lambda net, ids: net.table(ids[ids > 0])).to("meta")
    assert "aten.index.Tensor" in record(model, IDS.to("meta")).notes[0]


def test_what_reads_past_the_dispatcher_is_answered_too() -> None:
    def forward(net: Net, ids: Tensor) -> Tensor:
        seen.append((f"{ids[0, 0]}", ids[0].tolist(), ids[1].numpy().tolist(), f"{net.count:02d}"))
        return net.table(ids.cpu())

    seen: list[tuple[Any, ...]] = []
    trace = recorded(forward)
    assert seen == [("3", [3, 0, 5, 0], [0, 0, 7, 1], "01")]
    assert trace.notes == ["the meta device holds no values: . ran __format__ on some, ones were assumed"]


def test_a_mask_made_on_the_cpu_reaches_the_attention() -> None:
    def forward(net: Net, ids: Tensor) -> Tensor:
        x = net.a(net.table(ids))[:, None]
        return F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4, dtype=torch.bool).tril())

    assert "torch.scaled_dot_product_attention" in ops(recorded(forward))


def test_arguments_are_kept_by_value() -> None:
    def forward(net: Net, ids: Tensor) -> Tensor:
        return net.table(ids + 1)

    (call,) = calls(recorded(forward), "table")
    assert call.spec is not None
    assert torch.equal(call.spec.args[0].value, IDS + 1)


def test_an_error_of_the_forward_passes_through() -> None:
    with pytest.raises(RuntimeError, match="reduction dim"):
        recorded(lambda net, ids: net.table(ids) @ torch.ones(3, 3))
