from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from normprobe.capture.every import watch_every
from normprobe.capture.recorder import record
from normprobe.capture.watch import Handler, watch
from normprobe.records import OpSite
from tests.measures.models import CASES, Case


class Keep(Handler):
    """Keeps what it is told, and when."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def before(self, arguments: Mapping[str, Any]) -> None:
        values = {n: v.tolist() if isinstance(v, Tensor) else v for n, v in arguments.items()}
        self.told.append(("before", values))

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        self.told.append(("after", output.tolist()))

    def settled(self) -> None:
        self.told.append(("settled", None))


class Shared(nn.Module):
    """Calls one module twice, with a sum of its own before, between and after."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubles()

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        x = self.inner(x) + 10
        return self.inner(x) + 100


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + x) + 1000


def add(path: str, ordinal: int, execution: int = 0) -> OpSite:
    return OpSite(path=path, op="aten.add.Tensor", ordinal=ordinal, execution=execution)


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        (add(".", 0), 1 + 1),
        (add(".", 1), 4 + 1000 + 10),
        (add(".", 2), 2 * 1014 + 1000 + 100),
        (add("inner", 0), 2 + 2),
        (add("inner", 1, 0), 4 + 1000),
        (add("inner", 0, 1), 1014 + 1014),
    ],
)
def test_operations_are_counted_by_module_run_and_ordinal(site: OpSite, expected: float) -> None:
    keep = Keep()
    watched = watch(Shared(), torch.ones(()), {site: keep})
    assert float(watched.output) == 3128
    assert [name for name, _ in keep.told] == ["before", "after", "settled"]
    assert keep.told[1] == ("after", expected)
    assert watched.reason(site) is None


@pytest.mark.parametrize("site", [add("inner", 2), add("inner", 0, 2), add("other", 0), add(".", 3)])
def test_a_site_that_is_not_reached_is_missed(site: OpSite) -> None:
    keep = Keep()
    watched = watch(Shared(), torch.ones(()), {site: keep, add(".", 0): Keep()})
    assert watched.missed == (site,)
    assert keep.told == []
    assert "did not run this operation" in (watched.reason(site) or "")


class Shape(Handler):
    def __init__(self) -> None:
        self.shape: tuple[int, ...] | None = None

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        first = output if isinstance(output, Tensor) else output[0]
        self.shape = tuple(first.shape)


@pytest.mark.parametrize("build", CASES)
def test_every_recorded_operation_is_found_again(build: Callable[[], Case]) -> None:
    case = build()
    trace = record(case.model, case.inputs)
    sites = {}
    for node in trace.nodes:
        call = trace.calls[node.call]
        if node.op.startswith("aten.") and not call.composite and node.outputs:
            site = OpSite(path=call.path, op=node.op, ordinal=node.ordinal, execution=call.execution)
            sites[site] = trace.values[node.outputs[0]].shape
    handlers = {site: Shape() for site in sites}
    watched = watch(case.model, case.inputs, handlers)
    assert len(sites) > 20
    assert watched.missed == ()
    assert watched.failed == {}
    assert {site: handler.shape for site, handler in handlers.items()} == sites


class Attends(nn.Module):
    """Two attention functions, which dissolve into products here, then a product and a sum."""

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            y = F.scaled_dot_product_attention(x, x, x, scale=0.5, attn_mask=torch.zeros(3, 3).to(x))
            y = F.scaled_dot_product_attention(y, x, x)[0]
        return torch.bmm(y, y.mT) + 1


def test_an_attention_function_is_one_operation_and_hides_its_parts() -> None:
    product = OpSite(path=".", op="aten.bmm.default")
    functions = [OpSite(path=".", op="scaled_dot_product_attention", ordinal=i) for i in (0, 1)]
    handlers = {site: Keep() for site in (*functions, product)}
    watched = watch(Attends(), torch.randn(1, 2, 3, 4, dtype=torch.float64), handlers)
    assert watched.missed == ()
    assert watched.failed == {}
    first, second, last = (handler.told for handler in handlers.values())
    assert sorted(first[0][1]) == ["attn_mask", "key", "query", "scale", "value"]
    assert sorted(second[0][1]) == ["key", "query", "value"]
    assert second[0][1]["query"] == first[1][1]
    assert torch.equal(torch.tensor(last[1][1], dtype=torch.float64) + 1, watched.output)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += 1
        x *= 5
        return x


def test_before_sees_what_an_operation_in_place_overwrites() -> None:
    keep = Keep()
    watch(InPlace(), torch.ones(()), {OpSite(path=".", op="aten.add_.Tensor"): keep})
    assert keep.told == [("before", {"self": 1.0, "other": 1}), ("after", 2.0), ("settled", None)]


class Value(Handler):
    """Reads the output again once it is settled."""

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        self.output = output

    def settled(self) -> None:
        self.value = float(self.output)


def test_an_output_is_settled_before_the_next_operation_changes_it() -> None:
    value = Value()
    assert float(watch(InPlace(), torch.ones(()), {OpSite(path=".", op="aten.add_.Tensor"): value}).output) == 10
    assert value.value == 2


class Fails(Handler):
    settlings = 0

    def settled(self) -> None:
        self.settlings += 1

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        raise ValueError("no such axis")


def test_an_error_in_a_handler_is_kept_and_the_forward_goes_on() -> None:
    site, other = add(".", 0), add(".", 2)
    keep, fails = Keep(), Fails()
    watched = watch(Shared(), torch.ones(()), {site: fails, other: keep})
    assert float(watched.output) == 3128
    assert watched.reason(site) == "no such axis"
    assert len(keep.told) == 3
    assert fails.settlings == 0, "after its error a handler is told nothing more"


class Adds(Handler):
    """Does itself what it watches."""

    def __init__(self) -> None:
        self.count = 0

    def before(self, arguments: Mapping[str, Any]) -> None:
        self.count += 1
        torch.add(torch.ones(()), 1)
        F.scaled_dot_product_attention(*(torch.zeros(1, 1, 2, 2),) * 3)


def test_what_a_handler_computes_is_not_counted() -> None:
    composite = OpSite(path=".", op="scaled_dot_product_attention")
    keep = Keep()
    second = composite.model_copy(update={"ordinal": 1})
    watched = watch(Attends(), torch.randn(1, 2, 3, 4), {composite: Adds(), second: Adds(), add(".", 0): keep})
    assert watched.missed == ()
    assert keep.told[1] == ("after", watched.output.tolist())
    sums = {add(".", i): Adds() for i in range(3)}
    assert watch(Shared(), torch.ones(()), sums).missed == ()
    assert [h.count for h in sums.values()] == [1, 1, 1]


class Stateful(nn.Module):
    """Changes a buffer, draws random numbers, and raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = x
        x = self.norm(self.linear(x)) + torch.rand(4) + random.random()
        if self.broken:
            raise RuntimeError("planted")
        return x


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_nothing_is_left_behind(broken: bool, grad: bool) -> None:
    model = Stateful().train()
    model.norm.eval()
    model.broken = broken
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = {name: dict(module.__dict__) for name, module in model.named_modules()}
    rng, python = torch.get_rng_state(), random.getstate()
    sites = {add(".", 0): Keep()}
    if broken:
        with pytest.raises(RuntimeError, match="planted"):
            watch(model, torch.randn(3, 4, generator=torch.Generator()), sites, grad=grad)
    else:
        watched = watch(model, torch.randn(3, 4, generator=torch.Generator()), sites, grad=grad)
        assert watched.output.requires_grad == grad
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == own
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert random.getstate() == python
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()


class Seen(TorchFunctionMode):
    """A mode of the user's own: notes the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Moded(nn.Module):
    """Runs an inner module under a mode of its own."""

    def __init__(self, mode: Callable[[], Seen]) -> None:
        super().__init__()
        self.inner, self.mode = nn.Tanh(), mode

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            y = self.inner(x + 1)
            return y + 2


def test_a_mode_that_the_model_enters_itself_stays_the_innermost() -> None:
    mode, keep = Seen(), Keep()
    watched = watch(Moded(lambda: mode), torch.zeros(()), {add(".", 1): keep}, everywhere=False)
    assert mode.names == ["add", "tanh", "add"]
    assert keep.told[1] == ("after", float(watched.output))
    assert watched.reason(add(".", 1)) is None


def test_operations_before_the_first_forward_are_among_every_one() -> None:
    sites: list[OpSite] = []

    def make(site: OpSite) -> Handler:
        sites.append(site)
        return Handler()

    model = nn.Tanh()
    model.register_forward_pre_hook(lambda module, args: args[0] + 1)
    watch_every(model, torch.zeros(()), make)
    assert [site.op for site in sites] == ["aten.add.Tensor", "aten.tanh.default"]
