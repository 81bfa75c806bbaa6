from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normprobe import probe, stats
from normprobe.capture.invoke import invoke
from normprobe.errors import InputError, SettingError
from normprobe.measures.gradient_depth import by_depth
from normprobe.measures.gradients import measure_gradients
from normprobe.records import Branch, BranchGradient, GradientMeasure, OpSite, Stream
from normprobe.report.render import document
from tests.measures.models import CASES, Adds, Case, ResNet, anatomy_of, gpt2, llama, shaken, t5
from tests.models import Block, Decoder, decoder, layer_norm, made_in_inference_mode


def measured(model: nn.Module, inputs: Any, loss: Any = None) -> GradientMeasure:
    found, skipped = measure_gradients(model, inputs, anatomy_of(model, inputs), loss)
    assert skipped == ()
    assert found is not None
    return found


def reference(case: Case, loss: Callable[[Any], Tensor]) -> tuple[float, dict[str, Tensor], list[list[float]]]:
    """Loss, gradient of every parameter by `backward`, and RMS of the gradient at every tap where a mask of the inputs
    hides nothing, all in float64."""
    model, states = case.model.double(), [[] for _ in case.taps]
    hooks = []

    def keep(value: Any, into: list[Tensor]) -> None:
        tensor = value if isinstance(value, Tensor) else value[0]
        tensor.retain_grad()
        into.append(tensor)

    for into, taps in zip(states, case.taps, strict=True):
        for module, side in taps:
            if side == "in":
                hooks.append(module.register_forward_pre_hook(lambda m, args, into=into: keep(args, into)))
            else:
                hooks.append(module.register_forward_hook(lambda m, args, out, into=into: keep(out, into)))
    inputs = case.inputs
    if not isinstance(inputs, dict):
        inputs = tuple(t.double() for t in inputs) if isinstance(inputs, tuple) else inputs.double()
    value = loss(invoke(model, inputs))
    value.backward()
    for hook in hooks:
        hook.remove()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    seen = slice(None) if mask is None else mask.bool()
    rms = [[float(t.grad[seen].square().mean().sqrt()) for t in taps] for taps in states]
    model.float()
    return float(value.detach()), gradients, rms


def square(output: Any) -> Tensor:
    first = output if isinstance(output, Tensor) else next(iter(output.values()))
    return first.square().mean()


@pytest.mark.parametrize("build", [b for b in CASES if b.__name__ != "resnet"])
def test_gradients_equal_those_of_a_float64_backward(build: Callable[[], Case]) -> None:
    case = build()
    anatomy = anatomy_of(case.model, case.inputs)
    found, skipped = measure_gradients(case.model, case.inputs, anatomy, lambda output, inputs: square(output))
    assert skipped == ()
    assert found is not None
    value, gradients, rms = reference(case, square)
    assert found.loss == "given"
    assert found.value == pytest.approx(value, rel=1e-5)
    for stream, expected in zip(anatomy.streams, rms, strict=True):
        measures = [b for b in found.branches if b.stream == stream.name]
        adds = list(dict.fromkeys(branch.add for branch in stream.branches))
        for branch, measure in zip(stream.branches, measures, strict=True):
            norm = math.sqrt(sum(float(gradients[n].square().sum()) for n in branch.parameters))
            assert measure.parameter_norm == pytest.approx(norm, rel=1e-4)
            assert measure.parameters == sum(gradients[n].numel() for n in branch.parameters)
            assert measure.activation_rms == pytest.approx(expected[adds.index(branch.add)], rel=1e-4)


def test_the_gradient_at_an_add_in_place_is_taken_before_the_activation_in_place() -> None:
    model, x = shaken(ResNet()), torch.randn(2, 3, 5, 7)
    found = measured(model, x)
    plain = PlainResNet(model)
    out = plain(x)
    expected = torch.autograd.grad(out.square().mean(), plain.sums)
    rms = [float(g.square().mean().sqrt()) for g in expected]
    assert [b.activation_rms for b in found.branches] == pytest.approx(rms, rel=1e-4)
    after = [float(g.square().mean().sqrt()) for g in torch.autograd.grad(plain(x).square().mean(), plain.acts)]
    assert after[0] != pytest.approx(rms[0], rel=1e-2), "the two places must differ for this test to say anything"


class PlainResNet(nn.Module):
    """`ResNet` without operations in place."""

    def __init__(self, of: ResNet) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        self.sums, self.acts = [], []
        x = self.of.stem(x)
        for block in self.of.blocks:
            self.sums.append(block(x) + x)
            x = F.relu(self.sums[-1])
            self.acts.append(x)
        return self.of.head(x.mean((2, 3)))


def test_the_loss_of_a_language_model_is_that_of_the_next_token() -> None:
    case = gpt2()
    ids = case.inputs["input_ids"]
    found = measured(case.model, case.inputs)
    with torch.no_grad():
        logits = case.model(**case.inputs).logits
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert found.loss == "cross-entropy of the next token"
    assert found.value == pytest.approx(float(expected))


def test_padding_has_no_part_in_the_loss_and_the_decoder_has_its_own_tokens() -> None:
    case = llama()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    inputs = {**case.inputs, "attention_mask": mask}
    with torch.no_grad():
        logits = case.model(**inputs).logits[:, :-1]
    targets = inputs["input_ids"][:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert measured(case.model, inputs).value == pytest.approx(float(expected))
    assert measured(t5().model, t5().inputs).loss == "cross-entropy of the next token"


def test_the_models_own_loss_is_taken_where_there_are_labels() -> None:
    case = gpt2()
    inputs = {**case.inputs, "labels": case.inputs["input_ids"]}
    found = measured(case.model, inputs)
    assert found.loss == "the model's own"
    assert found.value == pytest.approx(float(case.model(**inputs).loss.detach()))


def test_other_outputs_give_their_mean_square() -> None:
    model, x = Adds(torch.randn(5, 8)), torch.randn(1, 4, 8)
    found = measured(model, x)
    assert found.loss == "mean square of the first output"
    assert found.value == pytest.approx(float(model(x).detach().square().mean()))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, inputs: output, r"found: a tensor of shape \(1, 4, 8\)"),
        (lambda output, inputs: 3.0, "found: float"),
        (lambda output, inputs: output.detach().sum(), "without a gradient"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(loss: Any, message: str) -> None:
    model, x = Adds(torch.randn(5, 8)), torch.randn(1, 4, 8)
    with pytest.raises(InputError, match=message):
        measured(model, x, loss)


class Chain(nn.Module):
    """Block i writes `scale[i]` times a linear map of the stream; the gradient of its weight grows alike."""

    def __init__(self, scales: list[float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in scales)
        self.scales = scales
        for block in self.blocks:
            nn.init.zeros_(block.weight)

    def forward(self, x: Tensor) -> Tensor:
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = x + scale * block(x)
        return x


def test_ratio_and_slope_of_gradients_that_grow_tenfold_a_branch() -> None:
    found = measured(Chain([1.0, 10.0, 100.0, 1000.0]), torch.randn(1, 4, 8))
    assert found.last_to_first == pytest.approx(1000, rel=1e-5)
    assert found.slope == pytest.approx(math.log(10), rel=1e-5)


def test_a_shared_parameter_counts_with_its_whole_gradient_in_each_branch() -> None:
    model, x = Chain([1.0, 2.0, 3.0, 4.0]), torch.randn(1, 4, 8)
    shared = model.blocks[3].weight = model.blocks[1].weight
    found = measured(model, x)
    (gradient,) = torch.autograd.grad(model(x).square().mean(), shared)
    norms = [b.parameter_norm for b in found.branches]
    assert [norms[1], norms[3]] == pytest.approx([float(gradient.norm())] * 2, rel=1e-5)
    assert norms[0] != pytest.approx(norms[1], rel=0.1)


def test_a_branch_without_gradient_has_no_slope() -> None:
    found = measured(Chain([0.0, 1.0, 1.0, 1.0]), torch.randn(1, 4, 8))
    assert found.branches[0].parameter_norm == 0
    assert math.isnan(found.last_to_first)
    assert math.isnan(found.slope)


def test_a_gradient_that_is_not_finite_stays_so() -> None:
    model = Chain([1.0] * 4)
    x = torch.randn(1, 4, 8)
    found = measured(model, x, lambda output, inputs: output.sum() * math.inf)
    assert not any(math.isfinite(b.parameter_norm) for b in found.branches)
    assert not math.isfinite(found.value)


class Hooked(nn.Module):
    """A stream whose parameters are partly frozen, partly shared, and watched by hooks of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain([1.0, 2.0, 3.0, 4.0])
        self.chain.blocks[3].weight = self.chain.blocks[2].weight
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.chain.blocks[0].weight.requires_grad_(False)
        self.calls = 0
        self.chain.blocks[1].weight.register_hook(self.count)
        self.chain.blocks[1].weight.register_post_accumulate_grad_hook(self.count)

    def count(self, gradient: Tensor) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(self.lstm(x)[0])


@pytest.mark.parametrize("broken", [False, True])
def test_parameters_grads_flags_and_hooks_are_left_alone(broken: bool) -> None:
    model, x = Hooked().train(), torch.randn(1, 4, 8)
    anatomy = anatomy_of(model, x)
    model.chain.blocks[1].weight.grad = torch.full((8, 8), 7.0)
    parameters = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    flat = [id(p) for p in model.lstm._flat_weights]
    versions = {n: p._version for n, p in model.named_parameters()}

    def loss(output: Tensor, inputs: Any) -> Tensor:
        if broken:
            raise RuntimeError("planted")
        return output.sum()

    if broken:
        with pytest.raises(RuntimeError, match="planted"):
            measure_gradients(model, x, anatomy, loss)
    else:
        found, _ = measure_gradients(model, x, anatomy, loss)
        assert found is not None
        assert found.branches[0].parameter_norm > 0, "a frozen parameter has a gradient too"
    assert {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)} == parameters
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    assert {n: p._version for n, p in model.named_parameters()} == versions
    assert [id(p) for p in model.lstm._flat_weights] == flat
    grads = [n for n, p in model.named_parameters() if p.grad is not None]
    assert grads == ["chain.blocks.1.weight"]
    assert bool((model.chain.blocks[1].weight.grad == 7).all())
    assert model.calls == 0
    assert all(module.training for module in model.modules())


def test_an_operation_without_derivative_is_a_skip_with_the_error() -> None:
    class Stuck(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise NotImplementedError("planted: no derivative")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = Chain([1.0] * 4)

        def forward(self, x: Tensor) -> Tensor:
            return Stuck.apply(self.chain(x))

    model, x = Model(), torch.randn(1, 4, 8)
    found, (skip,) = measure_gradients(model, x, anatomy_of(model, x))
    assert found is None
    assert skip.why == "autograd cannot differentiate the loss: planted: no derivative"
    measures = "gain", "jacobian", "smoothness"
    reasons = {one.what: one.why for one in probe(model, x, measures=measures).skipped}
    assert all("planted: no derivative" in reasons[measure] for measure in measures)


class Refuses(nn.Module):
    """A kernel, or a model, that runs only where no gradient is asked for, as some do."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.chain, self.error = Chain([1.0] * 4), error

    def forward(self, x: Tensor) -> Tensor:
        x = self.chain(x)
        if x.requires_grad:
            raise self.error
        return x


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotImplementedError("planted: no backward here"), "planted: no backward here"),
        (AssertionError("planted: not in eval mode"), "AssertionError: planted: not in eval mode"),
    ],
)
def test_a_forward_that_refuses_gradients_is_a_skip_of_each_measure_that_needs_them(
    error: Exception, said: str
) -> None:
    report = probe(Refuses(error), torch.randn(1, 4, 8), level="backward", measures=("gain", "jacobian", "smoothness"))
    assert report.residual
    reasons = {one.what: one.why for one in report.skipped}
    for measure in ("gradients", "gain", "jacobian", "smoothness"):
        assert reasons[measure] == f"autograd cannot differentiate the model: {said}"


@pytest.mark.parametrize("around", [nullcontext, torch.inference_mode])
def test_gradients_of_a_model_that_was_made_in_inference_mode(around: type[AbstractContextManager[Any]]) -> None:
    model, inputs = decoder("pre")
    wanted = probe(model, inputs, level="backward", measures=["gain", "jacobian", "smoothness"]).measurements
    model, inputs = made_in_inference_mode((model, inputs))
    before = list(model.parameters())
    with around():
        found = probe(model, inputs, level="backward", measures=["gain", "jacobian", "smoothness"]).measurements
    assert wanted.gradients is not None
    assert (found.gradients, found.gain) == (wanted.gradients, wanted.gain)
    assert (found.jacobian, found.smoothness) == (wanted.jacobian, wanted.smoothness)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


def test_there_is_nothing_to_differentiate_on_meta() -> None:
    model = Chain([1.0] * 4)
    anatomy = anatomy_of(model, torch.randn(1, 4, 8))
    found, (skip,) = measure_gradients(model.to("meta"), torch.randn(1, 4, 8, device="meta"), anatomy)
    assert found is None
    assert "meta device" in skip.why


def test_steps_are_set_against_the_weights() -> None:
    case = llama()
    anatomy = anatomy_of(case.model, case.inputs)
    found, _ = measure_gradients(case.model, case.inputs, anatomy, lr=1e-3)
    assert found is not None
    _, gradients, _ = reference(case, lambda output: _next_token(output.logits, case.inputs["input_ids"]))
    weights = {name: parameter.detach().double() for name, parameter in case.model.named_parameters()}
    for branch, measure in zip(anatomy.streams[0].branches, found.branches, strict=True):
        weight = math.sqrt(sum(float(weights[n].square().sum()) for n in branch.parameters))
        update = math.sqrt(sum(float(gradients[n].square().sum()) for n in branch.parameters)) * 1e-3
        signs = math.sqrt(sum(weights[n].numel() for n in branch.parameters)) * 1e-3
        assert measure.weight_norm == pytest.approx(weight, rel=1e-5)
        assert measure.update_ratio == pytest.approx(update / weight, rel=1e-4)
        assert measure.adam_ratio == pytest.approx(signs / weight, rel=1e-5)


def _next_token(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_without_a_learning_rate_there_is_no_step() -> None:
    model, x = shaken(ResNet()), torch.randn(2, 3, 5, 7)
    assert all(b.update_ratio is None and b.adam_ratio is None and b.weight_norm for b in measured(model, x).branches)


def fresh(placement: str, layers: int) -> Decoder:
    """A decoder as it is drawn: gains at one, offsets at zero."""
    torch.manual_seed(0)
    return Decoder([Block(layer_norm, placement) for _ in range(layers)], layer_norm()).eval()


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
def test_the_closed_form_stands_beside_the_slope(placement: str) -> None:
    model, ids = fresh(placement, 6), torch.randint(0, 48, (2, 12))
    report = probe(model, ids, level="backward")
    assert report.data.measurements.init.trained is False
    found = report.gradients
    assert found is not None
    if placement == "sandwich":
        assert found.expected is None
        return
    ratios = torch.tensor([state.write_ratio for state in report.residual[0].states]).double()
    size = float(ratios.sort().values[5:7].mean())
    assert found.expected is not None
    assert found.expected.branch_rms == pytest.approx(size)
    slope = 0.5 * math.log(1 + size**2) if placement == "post" else 0.0
    assert found.expected.slope == pytest.approx(slope)
    assert [kind.expected for kind in found.kinds] == pytest.approx([math.exp(10 * slope)] * 2)
    assert found.expected.last_to_first == pytest.approx(math.exp(10 * slope))
    assert "closed form at initialisation" in document(report.data, "markdown")


def test_weights_that_were_trained_have_no_closed_form_beside_them() -> None:
    model, ids = decoder("pre", layers=6)
    report = probe(model, ids, level="backward")
    assert report.data.measurements.init.trained is not False
    assert report.gradients is not None
    assert report.gradients.expected is None
    assert "closed form at initialisation" not in document(report.data, "markdown")


def stream(*branches: tuple[str, int], placement: str = "post") -> Stream:
    """Branches by kind and by the write at which they are added."""
    made = tuple(
        Branch(
            path=f"b.{write}",
            block=f"b.{write}",
            kind=kind,
            placement="post",
            add=OpSite(path="b", op="a", ordinal=write),
        )
        for kind, write in branches
    )
    return Stream(name="b", width=8, depth=len(made), placement=placement, branches=made)


def gradients(of: Stream, norms: list[float]) -> list[BranchGradient]:
    return [
        BranchGradient(
            stream=of.name, branch=i, path=b.path, kind=b.kind, parameter_norm=norm, activation_rms=1.0, parameters=1
        )
        for i, (b, norm) in enumerate(zip(of.branches, norms, strict=True))
    ]


def test_kinds_are_compared_with_their_own_alone() -> None:
    """Attention falls by 1 % a write and MLP, a hundred times as large, by 1 % too."""
    one = stream(*((kind, 2 * i + j) for i in range(3) for j, kind in enumerate(("attention", "mlp"))))
    norms = [(100.0 if i % 2 else 1.0) * 0.99**i for i in range(6)]
    found = by_depth([one], gradients(one, norms), untrained=True)
    assert found["slope"] == pytest.approx(math.log(0.99))
    assert [(k.kind, k.branches, k.span) for k in found["kinds"]] == [("attention", 3, 4), ("mlp", 3, 4)]
    assert [k.last_to_first for k in found["kinds"]] == pytest.approx([0.99**4] * 2)
    assert found["last_to_first"] == pytest.approx(0.99**4)
    assert [k.expected for k in found["kinds"]] == pytest.approx([4.0] * 2), "√2 a write at unit branches"


def test_branches_that_are_merged_before_the_add_are_one_write() -> None:
    one = stream(*((kind, i) for i in range(3) for kind in ("attention", "mlp")))
    found = by_depth([one], gradients(one, [1.0, 10.0, 2.0, 20.0, 4.0, 40.0]), untrained=True)
    assert found["slope"] == pytest.approx(math.log(2))
    assert [k.expected for k in found["kinds"]] == pytest.approx([2.0] * 2), "√2 a write, two writes"


def test_one_block_of_two_kinds_has_no_depth() -> None:
    model, ids = fresh("pre", 1), torch.randint(0, 48, (2, 12))
    report = probe(model, ids, level="backward")
    found = report.gradients
    assert found is not None
    assert [(kind.kind, kind.branches) for kind in found.kinds] == [("attention", 1), ("mlp", 1)]
    assert math.isnan(found.last_to_first)
    assert math.isnan(found.slope)
    assert found.expected is None
    assert "no ratio and no slope: no two branches of one kind" in document(report.data, "markdown")


def test_gradients_have_their_own_dtype_not_that_of_the_loss() -> None:
    model, x = Chain([1.0] * 4).bfloat16(), torch.randn(1, 4, 8).bfloat16()
    assert measured(model, x).basis.dtype == "bfloat16"


def test_a_learning_rate_that_would_have_no_effect_is_refused() -> None:
    model, ids = decoder("pre")
    with pytest.raises(SettingError, match="no gradients are taken"):
        probe(model, ids, lr=1e-3)
    with pytest.raises(SettingError, match="no positive number"):
        probe(model, ids, level="backward", lr=-1.0)
    assert "update / weight at lr 0.001" in document(probe(model, ids, level="backward", lr=1e-3).data, "markdown")


def test_the_gradient_at_an_add_leaves_padding_out() -> None:
    case = llama()
    mask = torch.ones_like(case.inputs["input_ids"])
    mask[1, :5] = 0
    inputs = case.inputs | {"attention_mask": mask}
    found, _ = measure_gradients(case.model, inputs, anatomy_of(case.model, inputs))
    assert found is not None
    states: list[Tensor] = []
    model = case.model.double()
    hooks = [
        layer.register_forward_hook(lambda m, i, o: states.append(o if isinstance(o, Tensor) else o[0]))
        for layer in model.model.layers
    ]
    logits = model(**inputs).logits
    for hook in hooks:
        hook.remove()
    targets = inputs["input_ids"][:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
    last_of_layer = [one for one in found.branches if one.kind == "mlp"]
    for branch, gradient in zip(last_of_layer, torch.autograd.grad(loss, states), strict=True):
        assert branch.activation_rms == pytest.approx(float(gradient[mask == 1].square().mean().sqrt()), rel=1e-4)


def test_the_interval_of_the_slope_is_that_of_the_line_through_the_branches() -> None:
    """One kind: held against numpy's covariance of a fit through the logarithms."""
    numpy = pytest.importorskip("numpy")
    torch.manual_seed(0)
    model = Adds(torch.randn(7, 16))
    for block in model.blocks:
        nn.init.normal_(block.linear.weight, std=0.3)
    found = measured(model, torch.randn(2, 3, 16))
    logs = numpy.log([b.parameter_norm for b in found.branches])
    (slope, _), covariance = numpy.polyfit(range(7), logs, 1, cov=True)
    half = stats.student_t(0.95, 5) * math.sqrt(covariance[0, 0])
    assert found.slope == pytest.approx(slope)
    assert found.interval == pytest.approx((slope - half, slope + half))


@pytest.mark.parametrize("gain", [0.5, 1.0, 2.0])
def test_gradients_by_the_outputs_of_layers_without_a_stream(gain: float) -> None:
    """Layers with orthogonal rows and a gain carry the norm of a gradient back by that gain each, whatever the
    widths."""
    widths = itertools.pairwise((16, 14, 11, 9, 7, 5))
    model = nn.Sequential(*(nn.Linear(inside, outside, bias=False) for inside, outside in widths))
    for layer in model:
        nn.init.orthogonal_(layer.weight, gain)
    found = measured(model, torch.randn(3, 16), lambda output, inputs: square(output))
    assert [layer.parameter for layer in found.layers] == [f"{i}.weight" for i in range(5)]
    sizes = [layer.output_norm for layer in found.layers]
    assert [a / b for a, b in itertools.pairwise(sizes)] == pytest.approx([gain] * 4, rel=1e-4)
    case = gpt2()
    assert measured(case.model, case.inputs).layers == ()
