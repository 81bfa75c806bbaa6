"""NP201 where a head has several layers with a norm behind them, and where norms lie inside the branches alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from normprobe.records import RawEnd
from tests import models
from tests.checks import builders as b
from tests.checks.placement.planted import anatomy, codes, found, judge, replace
from tests.models import VOCABULARY, WIDTH


def headed(*between: Callable[[], nn.Module], final: bool = False) -> models.Built:
    """A pre-norm decoder whose head has one layer more, with these steps behind it."""
    model, inputs = models.decoder("pre", final=final)
    steps = [nn.Linear(WIDTH, WIDTH), *(make() for make in between), nn.Linear(WIDTH, VOCABULARY)]
    model.head = nn.Sequential(*steps)
    return model, inputs


def test_a_raw_stream_that_a_head_bends_before_it_norms_is_a_warning() -> None:
    (finding,) = found("NP201", *headed(nn.GELU, models.layer_norm))
    assert finding.severity.value == "warning"
    assert "the raw stream is read without a norm by head.0, after 6 writes; the next norm, head.2," in finding.message
    assert found("NP201", *headed(nn.GELU, models.layer_norm, final=True)) == ()


def test_a_head_without_any_norm_is_an_error() -> None:
    (finding,) = found("NP201", *headed(nn.GELU))
    assert (finding.severity.value, "the next norm" in finding.message) == ("error", False)


def test_a_norm_right_behind_weights_leaves_it_open() -> None:
    model, inputs = headed(models.layer_norm, nn.GELU)
    (stream,) = anatomy(model, inputs).streams
    assert (stream.needs_final_norm, stream.raw_end) == (None, None)
    assert stream.final_norm_reason == "read by head.0 first; a norm follows behind weights, head.1"
    assert found("NP201", model, inputs) == ()


def test_the_norm_behind_weights_decides_the_severity() -> None:
    for later, severity in ((None, "error"), ("head.2", "warning")):
        end = RawEnd(reader="head.0", later=later)
        (finding,), _ = judge("NP201", b.document(streams=(b.stream(final_norm=None, raw_end=end),)))
        assert finding.severity.value == severity


def test_a_norm_before_the_last_block_is_misplaced_under_such_a_head_too() -> None:
    model, inputs = headed(nn.GELU, models.layer_norm)
    block = model.get_submodule("blocks.2")
    block.add_module("planted", nn.LayerNorm(WIDTH))
    block.register_forward_pre_hook(lambda module, args: (module.planted(args[0]), *args[1:]))
    assert codes(model, inputs) == {"NP203"}


def convnext(stages: int, kind: str = "ConvNext") -> models.Built:
    import transformers

    torch.manual_seed(0)
    widths = [8 * 2**i for i in range(stages)]
    facts = {"num_stages": stages, "hidden_sizes": widths, "depths": [2] * stages, "num_labels": 5}
    config = getattr(transformers, f"{kind}Config")(**facts, layer_norm_eps=1e-6)
    model = getattr(transformers, f"{kind}ForImageClassification")(config).eval()
    return model, {"pixel_values": torch.randn(2, 3, 64, 64)}


@pytest.mark.parametrize("kind", ["ConvNext", "ConvNextV2"])
def test_the_stage_of_a_pyramid_that_alone_ends_raw_is_a_warning(kind: str) -> None:
    model, inputs = convnext(4, kind)
    assert found("NP201", model, inputs) == ()
    replace(model, f"{kind.lower()}.layernorm", nn.Identity())
    (finding,) = found("NP201", model, inputs)
    assert (finding.where, finding.severity.value) == (f"{kind.lower()}.encoder.stages.3.layers", "warning")
    assert "a mean or sum over the tokens of the raw stream is read without a norm by classifier" in finding.message


class Dense(nn.Module):
    """Reads the last stage of a pyramid place by place."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Conv2d(64, 5, 1)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(pixel_values).last_hidden_state)


def test_a_head_that_reads_the_last_stage_place_by_place_leaves_it_open() -> None:
    model, inputs = convnext(4)
    dense = Dense(model.convnext).eval()
    assert [stage.final_norm is None for stage in anatomy(dense, inputs).streams] == [False, False, False, True]
    assert found("NP201", dense, inputs) == ()


@pytest.mark.parametrize("stages", [1, 2])
def test_too_few_other_stages_leave_it_open(stages: int) -> None:
    model, inputs = convnext(stages)
    replace(model, "convnext.layernorm", nn.Identity())
    stream = anatomy(model, inputs).streams[-1]
    assert (stream.final_norm, stream.needs_final_norm, stream.raw_end) == (None, None, None)
    assert stream.final_norm_reason.startswith("its branches have their norms inside alone")
    assert found("NP201", model, inputs) == ()


def test_another_stage_without_a_norm_leaves_it_open() -> None:
    model, inputs = convnext(4)
    replace(model, "convnext.encoder.stages.2.downsampling_layer.0", nn.Identity())
    replace(model, "convnext.layernorm", nn.Identity())
    stages = anatomy(model, inputs).streams
    assert [stage.final_norm is None for stage in stages] == [False, True, False, True]
    assert found("NP201", model, inputs) == ()


@pytest.mark.parametrize(("norm", "needs"), [(nn.BatchNorm1d, False), (lambda n: nn.GroupNorm(1, n), None)])
def test_batch_norms_inside_branches_size_nothing(norm: Callable[[int], nn.Module], needs: bool | None) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.norm, self.narrow = nn.Conv1d(8, 16, 3, padding=1), norm(16), nn.Conv1d(16, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.narrow(torch.relu(self.norm(self.wide(x))))

    model = nn.Sequential(nn.Conv1d(3, 8, 1), Block(), Block(), nn.Conv1d(8, 5, 1)).eval()
    (stream,) = anatomy(model, torch.randn(2, 3, 12)).streams
    assert {branch.placement for branch in stream.branches} == {"none"}
    assert stream.needs_final_norm is needs
