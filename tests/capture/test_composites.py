"""Torch functions that are seen as wholes, wherever they are called from."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normprobe.capture.recorder import record
from normprobe.errors import InputError
from tests.capture.flow import ops, sources

X = torch.randn(2, 5, 8)
RECURRENT = [nn.LSTM, nn.GRU, nn.RNN, lambda a, b: nn.RNN(a, b, nonlinearity="relu")]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _ = self.inner(x, x, x, need_weights=False)
        return F.scaled_dot_product_attention(first, x, x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_inside_and_outside_of_torchs_own_functions(device: str) -> None:
    trace = record(Attends().to(device), X)
    assert [(c.path, c.composite) for c in trace.calls if c.composite] == [
        ("inner", "scaled_dot_product_attention"),
        (".", "scaled_dot_product_attention"),
    ]
    assert not [op for op in ops(trace) if op.startswith("aten._scaled_dot") or "softmax" in op]


def test_torch_is_put_back_also_after_an_error() -> None:
    before = F.scaled_dot_product_attention
    record(Attends(), X)
    assert F.scaled_dot_product_attention is before
    with pytest.raises(AssertionError, match="dimension of 8"):
        record(Attends(), torch.randn(2, 5, 7))
    with pytest.raises(InputError, match="no inputs"):
        record(Attends(), None)  # type: ignore[arg-type]
    assert F.scaled_dot_product_attention is before


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("build", RECURRENT)
def test_recurrent_layers_are_one_operation(build: type[nn.RNN], device: str) -> None:
    trace = record(build(8, 8).to(device), X)
    assert len([op for op in ops(trace) if op.startswith("torch.")]) == 1
    assert sources(trace, trace.outputs[0][1]) == {"0", "weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"}


@pytest.mark.parametrize("build", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_are_one_operation(build: type[nn.RNNCell]) -> None:
    trace = record(build(8, 8), X[0])
    assert [op for op in ops(trace) if op.startswith("torch.")] == [f"torch.{_name(build)}"]


def _name(build: type[nn.RNNCell]) -> str:
    return {nn.LSTMCell: "lstm_cell", nn.GRUCell: "gru_cell", nn.RNNCell: "rnn_tanh_cell"}[build]
