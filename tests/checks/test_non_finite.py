"""NP504 on models with planted faults."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe import probe
from normprobe.checks import find, run
from tests import models
from tests.checks import builders as b


class Write(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Written(nn.Module):
    """Four blocks on a stream, with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(Write(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.full((3,), math.nan))  # nothing reads it

    def forward(self, x: Tensor) -> Tensor:
        for block in self.b:
            x = block(x)
        return self.head(x)


def test_np504_names_the_parameter_that_holds_nan_and_no_place_before_it() -> None:
    torch.manual_seed(0)
    model, x = Written(), torch.randn(1, 4, 8)
    with torch.no_grad():
        model.b[2].weight[1, 2] = math.nan
    (found,) = [f for f in probe(model, x, level="backward").findings if f.code == "NP504"]
    assert found.where == "b.2.weight"
    assert found.message == (
        "not finite from here on: stream b, outputs, loss; b.2.weight holds 1 NaN of 64 values; "
        "gradients are not finite either"
    )
    assert found.places == ("b.2.weight", "b.2", "b.3"), "b.0 and b.1 are finite, and nothing reads `frozen`"


def test_np504_names_a_buffer_that_holds_infinity() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), torch.randn(4, 8)
    model[1].running_mean[:2] = math.inf
    (found,) = [f for f in probe(model, x).findings if f.code == "NP504"]
    assert (found.where, found.message.rpartition("; ")[2]) == (
        "1.running_mean",
        "1.running_mean holds 2 infinities of 8 values",
    )


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.unread = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v.relu().clamp(max=1)).nan_to_num()


def test_np504_finds_a_weight_whose_nan_an_operation_hides() -> None:
    torch.manual_seed(0)
    model, x = Attending(), torch.randn(2, 5, 8)
    with torch.no_grad():
        model.qkv.weight[1, 2] = math.nan
        model.unread.weight[1, 2] = math.nan
    report = probe(model, x)
    assert report.data.measurements.output_finite
    (found,) = [f for f in report.findings if f.code == "NP504"]
    assert (found.where, found.severity.value, found.places) == ("qkv.weight", "error", ())
    assert found.message.endswith("an operation hides it; qkv.weight holds 1 NaN of 192 values")


class Rooted(nn.Module):
    """The gradient breaks at the last parameter, outside of every stream, and reaches no other."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Written()
        self.scale = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.scale.abs().sqrt()


def test_np504_finds_a_gradient_that_breaks_outside_the_streams() -> None:
    torch.manual_seed(0)
    (found,) = [f for f in probe(Rooted(), torch.randn(1, 4, 8), level="backward").findings if f.code == "NP504"]
    assert found.message == (
        "not finite, though all of the forward is: gradients of parameters outside the streams; "
        "the backward of SqrtBackward0 in the model itself gave the first"
    )
    assert "scale" in found.places


def test_np504_passes_an_add_that_autograd_does_not_know() -> None:
    """Blocks that run without gradients: none was traced there, which is not a gradient that is NaN."""
    for traced, count in ((False, 0), (True, 1)):
        rows = b.gradients()
        lost = rows.branches[0].model_copy(update={"activation_rms": math.nan, "traced": traced})
        found = rows.model_copy(update={"branches": (lost, *rows.branches[1:])})
        assert len([f for f in run(b.document(gradients=found), [find("NP504")])[0]]) == count


class Truncated(nn.Module):
    """Its first block runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Written(), Written()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.last(x)


def test_a_stream_under_no_grad_is_told_from_a_broken_one() -> None:
    report = probe(Truncated(), torch.randn(1, 4, 8), level="backward")
    assert report.gradients is not None
    assert {branch.traced for branch in report.gradients.branches} == {True, False}
    assert "NP504" not in {f.code for f in report.findings}


def overflowing(factor: float, bias: float) -> models.Built:
    """A GPT-2 whose second block has queries and keys of other sizes, the attention written out."""
    model, inputs = models.gpt2()
    model.set_attn_implementation("eager")
    projection = model.get_submodule("transformer.h.1.attn.c_attn")
    with torch.no_grad():
        projection.weight[:, : 2 * models.WIDTH] *= factor
        projection.bias[3] += bias
    return model, inputs


def finite(model: nn.Module, inputs: Any, path: str) -> bool:
    """Whether a module gives out numbers alone: with AVX-512 torch's kernel does so for infinite logits, else not."""
    outputs: list[Tensor] = []
    with model.get_submodule(path).register_forward_hook(lambda _m, _i, out: outputs.append(out[0])), torch.no_grad():
        model(**inputs)
    (output,) = outputs
    return bool(output.isfinite().all())


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_logits_that_overflow_are_told_as_the_cause(kernel: str) -> None:
    """Some of their sums are infinite, some are NaN."""
    model, inputs = overflowing(1e28, 0.0)
    model.set_attn_implementation(kernel)
    report = probe(model, inputs)
    (large,) = (f for f in report.findings if f.code == "NP401")
    assert (large.where, large.value) == ("transformer.h.1.attn", math.inf)
    cause = r"queries and keys of RMS 5\S+e\+27 and 5\S+e\+27 over \d features in head 0 are finite, and their product"
    assert re.search(rf"logits reach inf in head 0 \({cause} overflows float32\)", large.message)
    lost = [f for f in report.findings if f.code == "NP504"]
    hidden = kernel == "sdpa" and finite(model, inputs, "transformer.h.1.attn")
    assert [f.where for f in lost] == ([] if hidden else ["transformer.h.1.attn"])
    assert all(re.search(f"; {cause} overflows float32", f.message) for f in lost)


def test_logits_of_infinite_queries_are_no_cause() -> None:
    report = probe(*overflowing(1.0, float("inf")))
    (lost,) = (f for f in report.findings if f.code == "NP504")
    assert lost.where == "transformer.h.1.attn.c_attn.bias"
    assert "overflows" not in lost.message
    assert not [f for f in report.findings if f.code == "NP401"]
    (skipped,) = (s for s in report.skipped if s.what.startswith("NP401"))
    assert "transformer.h.1.attn" in skipped.what
