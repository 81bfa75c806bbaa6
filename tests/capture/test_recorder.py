"""Recording one forward: calls, operations, where the outputs come from."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe.capture.recorder import record
from normprobe.errors import InputError
from tests.capture.flow import calls, ops, output_sources, sources
from tests.models import gpt2, torch_encoder


class Net(nn.Module):
    """A module with layers a, b and c, its forward given as a function of it and its arguments."""

    def __init__(self, forward: Any, width: int = 4) -> None:
        super().__init__()
        self.body = forward
        self.a, self.b, self.c = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


X = torch.randn(4, 4)


# ---- calls


def test_every_module_is_a_call_with_its_values() -> None:
    trace = record(Net(lambda net, x: net.b(net.a(x))), X)
    root, a, b = trace.calls
    assert [(c.path, c.class_name, c.execution) for c in trace.calls] == [
        (".", "Net", 0),
        ("a", "Linear", 0),
        ("b", "Linear", 0),
    ]
    assert [c.parent for c in trace.calls] == [-1, 0, 0]
    assert a.outputs == b.inputs
    assert root.outputs == b.outputs == (trace.outputs[0][1],)
    assert sources(trace, b.outputs[0]) == {"a.weight", "b.weight", "0"}
    assert trace.inside(b.id, root.id)
    assert not trace.inside(b.id, a.id)


def test_module_run_twice_is_counted_twice() -> None:
    trace = record(Net(lambda net, x: net.a(net.b(net.a(x)))), X)
    assert [c.execution for c in calls(trace, "a")] == [0, 1]
    assert [c.execution for c in calls(trace, "b")] == [0]


def test_shared_module_runs_under_its_first_path() -> None:
    net = Net(lambda net, x: net.c(net.a(x)))
    net.c = net.a
    trace = record(net, X)
    assert [c.execution for c in calls(trace, "a")] == [0, 1]
    assert calls(trace, "c") == []
    assert output_sources(trace) == {"output": {"a.weight", "0"}}


def test_module_called_by_its_forward_is_a_call() -> None:
    trace = record(Net(lambda net, x: net.a.forward(x)), X)
    assert len(calls(trace, "a")) == 1
    assert trace.path(trace.producer(trace.outputs[0][1])) == "a"


def test_forward_replaced_on_the_instance_runs_and_stays() -> None:
    net = Net(lambda net, x: net.a(x))

    def replaced(x: Tensor) -> Tensor:
        return net.b(x) * 2

    net.a.forward = replaced
    trace = record(net, X)
    assert net.a.__dict__["forward"] is replaced
    assert output_sources(trace) == {"output": {"b.weight", "0"}}
    assert [trace.calls[c.parent].path for c in calls(trace, "b")] == ["a"]


def test_ordinals_count_an_operation_inside_one_run() -> None:
    trace = record(Net(lambda net, x: (x + 1) + (net.a(x) + 2)), X)
    adds = [n for n in trace.nodes if n.op == "aten.add.Tensor"]
    assert [(trace.path(n), n.ordinal) for n in adds] == [(".", 0), (".", 1), (".", 2)]
    twice = record(Net(lambda net, x: net.a(net.a(x))), X)
    assert [n.ordinal for n in twice.nodes if n.op == "aten.mm.default"] == [0, 0]


def test_call_keeps_specs_not_tensors() -> None:
    trace = record(
        Net(lambda net, x, *, flag, index: net.a(x[index]) * flag), {"x": X, "flag": 2.0, "index": X[0].long()}
    )
    spec = trace.calls[0].spec
    assert spec is not None
    assert (spec.kwargs["flag"], spec.kwargs["x"].shape, spec.kwargs["x"].value) == (2.0, (4, 4), None)
    assert torch.equal(spec.kwargs["index"].value, X[0].long())


# ---- sources and outputs


@pytest.mark.parametrize(
    ("inputs", "names"),
    [(X, {"0"}), ((X, X + 1), {"0", "1"}), ([X, X + 1], {"0", "1"}), ({"left": X, "right": X + 1}, {"left", "right"})],
)
def test_inputs_by_name_or_position(inputs: Any, names: set[str]) -> None:
    def forward(net: Net, left: Tensor, right: Tensor | float = 0.0) -> Tensor:
        return net.a(left) + right

    assert output_sources(record(Net(forward), inputs)) == {"output": names | {"a.weight"}}


def test_inputs_nested_in_containers() -> None:
    trace = record(Net(lambda net, batch: net.a(batch["x"][0]) + batch["y"]), ({"x": [X], "y": X + 1},))
    names = [n.name for n in trace.nodes if n.op == "input"]
    assert len(set(names)) == 2
    assert output_sources(trace) == {"output": {*names, "a.weight"}}


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        (lambda y, z: y, {"output": "a"}),
        (lambda y, z: (y, z), {"0": "a", "1": "b"}),
        (lambda y, z: [z, y], {"0": "b", "1": "a"}),
        (lambda y, z: {"left": y, "right": z}, {"left": "a", "right": "b"}),
        (lambda y, z: (y, None, 3), {"0": "a"}),
    ],
)
def test_outputs_in_containers(wrap: Any, expected: dict[str, str]) -> None:
    trace = record(Net(lambda net, x: wrap(net.a(x), net.b(x))), X)
    assert output_sources(trace) == {k: {f"{v}.weight", "0"} for k, v in expected.items()}


def test_outputs_in_a_model_output() -> None:
    model, inputs = gpt2()
    trace = record(model, inputs | {"output_hidden_states": True})
    names = [name for name, _ in trace.outputs]
    assert names[0] == "logits"
    assert [name.startswith("hidden_states") for name in names] == [False, True, True, True]
    assert "transformer.h.0.ln_1.weight" in sources(trace, trace.outputs[2][1])
    assert "transformer.h.0.ln_1.weight" not in sources(trace, trace.outputs[1][1])


def test_tied_parameter_is_one_source_under_its_first_name() -> None:
    net = Net(lambda net, x: (net.a(x), net.b(x)))
    net.b.weight = net.a.weight
    assert output_sources(record(net, X)) == {"0": {"a.weight", "0"}, "1": {"a.weight", "0"}}


def test_buffers_and_constants_are_sources() -> None:
    net = Net(lambda net, x: x * net.table + torch.ones(4))
    net.register_buffer("table", torch.ones(4))
    trace = record(net, X)
    assert output_sources(trace) == {"output": {"table", "0"}}
    assert {n.op for n in trace.nodes} >= {"buffer", "input", "aten.ones.default"}


def test_number_known_before_the_forward_keeps_its_value() -> None:
    half = torch.tensor(0.5)
    trace = record(Net(lambda net, x: x * half), X)
    (constant,) = [n for n in trace.nodes if n.op == "constant"]
    assert constant.args == (0.5,)


# ---- composites and the fused encoder


@pytest.mark.parametrize("keywords", [True, False])
def test_attention_is_one_call_with_named_arguments(keywords: bool) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        q, k, v = (layer(x)[None, None] for layer in (net.a, net.b, net.c))
        if keywords:
            return F.scaled_dot_product_attention(query=q, key=k, value=v, scale=0.3, is_causal=True)
        return F.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.3)

    trace = record(Net(forward), X)
    (call,) = [c for c in trace.calls if c.composite]
    assert (call.path, call.composite, call.execution) == (".", "scaled_dot_product_attention", 0)
    assert (call.arguments["scale"], call.arguments["is_causal"]) == (0.3, True)
    for name, layer in (("query", "a"), ("key", "b"), ("value", "c")):
        assert sources(trace, call.arguments[name].value) == {f"{layer}.weight", "0"}
    assert sources(trace, call.outputs[0]) == {"a.weight", "b.weight", "c.weight", "0"}
    assert trace.outputs[0][1] == call.outputs[0]


def test_two_attentions_in_one_forward_are_counted() -> None:
    trace = record(Net(lambda net, x: attend(attend(x))), X)
    assert [c.execution for c in trace.calls if c.composite] == [0, 1]
    assert calls(trace, ".")[0].execution == 0


def test_attention_does_not_count_as_a_run_of_its_module() -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attend(x).view(4, 4)

    net = Net(lambda net, x: net.a(net.a(x)))
    net.a = Attends()
    trace = record(net, X)
    assert [c.execution for c in calls(trace, "a")] == [0, 1]
    assert [(c.parent, c.execution) for c in trace.calls if c.composite] == [(c.id, 0) for c in calls(trace, "a")]


def attend(x: Tensor) -> Tensor:
    q = x.view(1, 1, 4, 4)
    return F.scaled_dot_product_attention(q, q, q)


def test_encoder_is_recorded_off_its_fast_path() -> None:
    model, inputs = torch_encoder(True, False)
    before = torch.backends.mha.get_fastpath_enabled()
    trace = record(model, inputs)
    assert torch.backends.mha.get_fastpath_enabled() is before is True
    assert not [op for op in ops(trace) if "transformer_encoder" in op]
    assert len([op for op in ops(trace) if "native_layer_norm" in op]) == 4
    assert {c.path for c in trace.calls} >= {"layers.0.norm1", "layers.1.linear2"}


# ---- what a recording must not do


def test_recording_holds_no_tensor_of_the_forward() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        alive.append(weakref.ref(y))
        y = net.b(y)
        alive.append(weakref.ref(y))
        return y.sum()

    trace = record(Net(forward), X)
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    assert len(trace.values) > 4


def test_no_gradient_is_recorded() -> None:
    seen: list[bool] = []
    record(Net(lambda net, x: seen.append(net.a(x).requires_grad) or net.a(x)), X)
    assert seen == [False]


def test_error_of_the_forward_passes_through() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        net.a(x)
        raise KeyError("my own error")

    net = Net(forward)
    with pytest.raises(KeyError, match="my own error"):
        record(net, X)
    assert "forward" not in net.__dict__
    assert "forward" not in net.a.__dict__
    assert torch.is_grad_enabled()
    assert (X + 1).shape == X.shape  # no mode is left on the stack
    assert len(torch.overrides._get_current_function_mode_stack()) == 0


def test_model_of_no_inputs_is_told() -> None:
    with pytest.raises(InputError, match="no inputs were given"):
        record(Net(lambda net: 1), None)
