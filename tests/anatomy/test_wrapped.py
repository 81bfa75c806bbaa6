"""Models that something was wrapped around, put into or taken out of: the reading is that of the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import normprobe
from normprobe.records import Anatomy, Branch
from tests.models import MODELS, TOKENS, WIDTH, to_meta

X = torch.randn(2, TOKENS, WIDTH)


def residual(depth: int = 2, layer: Callable[[nn.Linear], nn.Module] = lambda linear: linear) -> nn.Module:
    return nn.Sequential(*(Block(layer) for _ in range(depth)), nn.LayerNorm(WIDTH)).eval()


class Block(nn.Module):
    def __init__(self, layer: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = layer(nn.Linear(WIDTH, 2 * WIDTH)), layer(nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def read(model: nn.Module, inputs: Any = X) -> Anatomy:
    return normprobe.probe(model, inputs, level="structure").anatomy


def branches(model: nn.Module) -> list[Branch]:
    (stream,) = read(model).streams
    assert (stream.final_norm is None, stream.placement) == (False, "pre")
    assert [(b.kind, b.branch_scale.kind) for b in stream.branches] == [("mlp", "none")] * 2
    return list(stream.branches)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.drop = base, nn.Dropout(0.1)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(self.drop(x)))


def test_adapters_are_part_of_the_weights_that_they_adapt() -> None:
    first, _ = branches(residual(layer=Adapted))
    assert set(first.readers) == {"0.up.base.weight", "0.up.base.bias", "0.up.a.weight"}
    assert set(first.writers) == {"0.down.base.weight", "0.down.base.bias", "0.down.b.weight"}


class Quantised(nn.Module):
    """Integers and scales in buffers, as many libraries keep them; the bias stays a parameter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        scales = base.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("whole", (base.weight.detach() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.whole.to(x.dtype) * self.scales, self.bias)


def test_quantised_weights_in_buffers_are_named_beside_a_bias() -> None:
    first, _ = branches(residual(layer=Quantised))
    assert set(first.writers) == {"0.down.whole", "0.down.scales", "0.down.bias"}


class Int8(Tensor):
    """A weight made of two tensors; its product multiplies by the scales at last."""

    @staticmethod
    def __new__(cls, whole: Tensor, scales: Tensor) -> Int8:
        return Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scales.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, whole: Tensor, scales: Tensor) -> None:
        self.whole, self.scales = whole, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Int8:
        return cls(inner["whole"], inner["scales"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = args
            return x @ weight.whole.to(x.dtype).mT * weight.scales + bias
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].whole, args[0].scales)
        raise NotImplementedError(f"{func}")


def int8(base: nn.Linear) -> nn.Linear:
    scales = base.weight.detach().abs().amax(1) / 127
    whole = (base.weight.detach() / scales[:, None]).round().to(torch.int8)
    base.weight = nn.Parameter(Int8(whole, scales), requires_grad=False)
    return base


def test_quantised_weights_of_a_tensor_subclass_are_read_by_their_name() -> None:
    first, _ = branches(residual(layer=int8))
    assert set(first.writers) == {"0.down.weight", "0.down.bias"}
    assert set(first.readers) == {"0.up.weight", "0.up.bias"}


@pytest.mark.filterwarnings("ignore")
def test_packed_weights_have_no_names_and_the_branch_is_an_mlp() -> None:
    quantised = torch.ao.quantization.quantize_dynamic(residual(), {nn.Linear}, dtype=torch.qint8)
    assert [b.writers for b in branches(quantised)] == [(), ()]
    ended = torch.ao.quantization.quantize_dynamic(nn.Sequential(residual(), nn.Linear(WIDTH, 5)), {nn.Linear})
    reasons = [s.why for s in normprobe.probe(ended, X, level="structure").skipped if s.what == "head"]
    assert len(reasons) == 1
    assert reasons[0].startswith("quantized.linear_dynamic")


class Whole(nn.Module):
    """A linear layer whose weight is a buffer of integers, scaled behind the product."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scales = linear.weight.detach().abs().amax(1) / 127
        self.register_buffer("whole", (linear.weight.detach() / scales[:, None]).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.whole.to(x.dtype).mT) * self.scales + self.bias


def test_the_scales_of_integer_weights_are_no_factors_of_the_stream() -> None:
    model = nn.Sequential(residual(layer=Whole), Whole(nn.Linear(WIDTH, 5)))
    report = normprobe.probe(model, X, level="structure")
    assert [b.branch_scale.kind for b in report.anatomy.streams[0].branches] == ["none", "none"]
    assert report.anatomy.head is not None
    assert (report.anatomy.head.path, report.anatomy.head.logit_multiplier) == ("1.whole", 1.0)
    assert report.target.parameters == sum(
        p.numel() for p in nn.Sequential(residual(), nn.Linear(WIDTH, 5)).parameters()
    )


def test_compiled_blocks_are_read_as_the_blocks() -> None:
    model = residual()
    expected = read(model)
    model[0] = compiled = torch.compile(model[0], backend="eager")
    assert read(model) == expected
    assert model[0] is compiled


def test_the_norms_of_a_compiled_script_are_read() -> None:
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)))
    (norm,) = normprobe.probe(scripted, X, level="structure").anatomy.norms
    assert (norm.kind, norm.affine) == ("layernorm", "weight+bias")


def test_a_scripted_model_is_read_as_far_as_its_operations_go() -> None:
    with pytest.warns(DeprecationWarning, match="torch.jit.trace"):
        scripted = torch.jit.trace(residual(), X)
    report = normprobe.probe(scripted, X, level="structure")
    assert [b.placement for b in report.anatomy.streams[0].branches] == ["pre", "pre"]
    assert report.anatomy.streams[0].final_norm is not None
    assert ("modules under .", "script modules do not tell when they run") in {(s.what, s.why) for s in report.skipped}


def test_an_exported_program_is_read_in_the_mode_of_its_export() -> None:
    exported = torch.export.export(residual(), (X,)).module()
    assert [b.placement for b in read(exported).streams[0].branches] == ["pre", "pre"]


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_checkpointed_blocks_count_once(name: str) -> None:
    model, inputs = MODELS[name]()
    expected = read(model, inputs)
    with pytest.warns(FutureWarning, match="gradient_checkpointing_enable"):
        model.train().gradient_checkpointing_enable()
    with torch.enable_grad():
        assert read(model, inputs) == expected


@pytest.mark.parametrize("build", [nn.LSTM, nn.GRU])
def test_a_recurrent_branch_has_no_stream_inside(build: type[nn.LSTM]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mix = nn.LayerNorm(WIDTH), build(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mix(self.norm(x))[0]

    model = nn.Sequential(Recurrent(), Recurrent()).eval()
    anatomy = read(model)
    (stream,) = anatomy.streams
    assert [(b.kind, b.placement) for b in stream.branches] == [("recurrent", "pre")] * 2
    assert set(stream.branches[0].writers) == {f"0.mix.{n}" for n, _ in model[0].mix.named_parameters()}
    assert read(to_meta(model), X).streams == anatomy.streams


def test_experts_are_mentioned_only_where_there_are_some() -> None:
    model, inputs = MODELS["llama"]()
    assert not [s for s in normprobe.probe(to_meta(model), inputs).skipped if "experts" in s.why]


def test_inputs_on_meta_and_with_values_give_the_same() -> None:
    model, inputs = MODELS["gpt2"]()
    to_meta(model)
    assert read(model, inputs) == read(model, pytree.tree_map(lambda t: t.to("meta"), inputs))


def test_parameters_that_a_hook_gathers_for_the_run_are_the_models_own() -> None:
    def shard(layer: nn.Module) -> None:
        """Keeps half of each parameter; the whole one is made right before the layer runs, and taken away behind it."""
        whole = dict(layer._parameters)
        halves = {name: nn.Parameter(p.detach()[: len(p) // 2].clone()) for name, p in whole.items()}

        def gather(*_: Any) -> None:
            layer._parameters.update({name: nn.Parameter(p.detach().clone()) for name, p in whole.items()})

        layer._parameters.update(halves)
        layer.register_forward_pre_hook(gather)
        layer.register_forward_hook(lambda *_: layer._parameters.update(halves))

    model = residual()
    plain = branches(model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            shard(layer)
    assert [(b.readers, b.writers, b.pre_norm) for b in branches(model)] == [
        (b.readers, b.writers, b.pre_norm) for b in plain
    ]
