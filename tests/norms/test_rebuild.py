"""Copies share nothing with the original, whatever state it is in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normprobe.capture.calls import CallSpec, TensorSpec
from normprobe.errors import UnreadableAnatomyError
from normprobe.norms.module_subject import ModuleSubject
from normprobe.norms.rebuild import rebuild
from normprobe.norms.subject import NotComparableError, draw
from tests.norms import zoo

CPU = torch.device("cpu")


def test_a_copy_has_the_dtype_the_values_and_no_hooks() -> None:
    block = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4))
    block[0].register_forward_hook(lambda *_: pytest.fail("a hook came along"))
    value = torch.arange(4.0, dtype=torch.float64)
    twin = rebuild(block, torch.float64, CPU, {"1.weight": value})
    twin(torch.ones(2, 4, dtype=torch.float64))
    assert torch.equal(twin[1].weight, value)
    assert twin[0].num_batches_tracked.dtype == torch.int64
    pointers = {t.data_ptr() for t in (*block.parameters(), *block.buffers())}
    assert not pointers & {t.data_ptr() for t in (*twin.parameters(), *twin.buffers())}
    assert len(block[0]._forward_hooks) == 1


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_old_weight_norm_after_a_forward() -> None:
    layer = nn.utils.weight_norm(nn.Linear(4, 4))
    layer(torch.ones(2, 4))
    twin = rebuild(layer, torch.float64, CPU, {})
    assert twin.weight.dtype == torch.float64
    assert twin.weight.is_leaf


def test_tied_parameters_stay_tied() -> None:
    first, second = nn.LayerNorm(4), nn.LayerNorm(4)
    second.weight = first.weight
    twin = rebuild(nn.Sequential(first, second), torch.float64, CPU, {})
    assert twin[0].weight is twin[1].weight


def test_values_unknown_on_meta_are_nan() -> None:
    twin = rebuild(nn.BatchNorm1d(4, device="meta"), torch.float32, CPU, {})
    assert twin.weight.isnan().all()
    assert int(twin.num_batches_tracked) == 0


def test_drawn_values_are_exact_in_half_and_away_from_zero() -> None:
    named = {"w": torch.empty(5000), "running_var": torch.empty(5000)}
    values = draw(named.items(), frozenset({"w"}), 3)
    for value in values.values():
        assert torch.equal(value, value.bfloat16().double())
        assert torch.equal(value, value.half().double())
        assert value.abs().min() >= 0.5
    assert (values["w"] + 1).abs().min() >= 0.25
    assert (values["w"] < 0).any()
    assert values["running_var"].min() > 0
    assert not any((value.abs() == 1).any() for value in values.values())
    assert torch.equal(draw(named.items(), frozenset({"w"}), 3)["w"], values["w"])


def test_drawn_scalars_are_told_apart() -> None:
    named = {f"s{i}": torch.empty(()) for i in range(30)}
    values = draw(named.items(), frozenset(named), 0).values()
    assert len({abs(float(value)) for value in values}) == 30


def test_the_shape_is_shortened_where_the_module_allows_it() -> None:
    assert ModuleSubject(nn.LayerNorm(8), zoo.call_of((1, 50, 8))).shape == (2, 4, 8)
    assert ModuleSubject(nn.GroupNorm(2, 8), zoo.call_of((1, 8, 50, 60))).shape == (2, 8, 4, 4)
    assert ModuleSubject(nn.LayerNorm([50, 8]), zoo.call_of((3, 50, 8))).shape == (2, 50, 8)
    assert ModuleSubject(nn.LayerNorm([8, 8]), zoo.call_of((3, 8, 8))).shape == (2, 8, 8)


def test_other_arguments_are_replayed() -> None:
    seen = []
    module = zoo.Rule(lambda self, x, mask, flag: seen.append((mask, flag)) or x * 1)
    mask = TensorSpec.of(torch.tensor([[True, False, True]]))
    call = CallSpec((TensorSpec((1, 3, 8), torch.float32, CPU), mask, "mode"), {})
    ModuleSubject(module, call).instance(torch.float32, 0).call(torch.ones(2, 3, 8))
    assert torch.equal(seen[-1][0], mask.value.expand(2, 3))
    assert seen[-1][1] == "mode"


def test_no_floating_argument_and_no_output_like_it() -> None:
    integers = CallSpec((TensorSpec.of(torch.zeros(2, 3, dtype=torch.long)),), {})
    with pytest.raises(NotComparableError, match="no floating tensor argument"):
        ModuleSubject(nn.Embedding(3, 4), integers)
    with pytest.raises(NotComparableError, match="output shapes"):
        ModuleSubject(nn.Linear(4, 7), zoo.call_of((2, 4)))


def test_a_module_that_cannot_be_copied() -> None:
    module = nn.LayerNorm(4)
    module.generator = (n for n in ())  # a generator cannot be copied
    with pytest.raises(UnreadableAnatomyError, match="cannot rebuild a copy of a LayerNorm"):
        ModuleSubject(module, zoo.call_of((2, 4)))
