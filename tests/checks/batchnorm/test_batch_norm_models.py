"""NP701 to NP706 on small networks: the fault planted, and the sound model beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normprobe import probe
from tests.checks.batchnorm.networks import Plain, Residual, Sequences, seen

NETWORKS = [Plain, Residual, Sequences]


def codes(model: nn.Module, x: Tensor, measures: tuple[str, ...] = ("batchnorm",)) -> dict[str, str]:
    """The worst severity of each code of the family."""
    found = probe(model, x, measures=measures).findings
    return {f.code: f.severity.value for f in reversed(found) if f.code.startswith("NP7")}


@pytest.mark.parametrize("network", NETWORKS)
def test_a_model_that_saw_its_data_is_sound(network: type[nn.Module]) -> None:
    model, x = seen(network)
    assert codes(model, x) == {}


@pytest.mark.parametrize("network", NETWORKS)
def test_a_fresh_model_is_sound(network: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = network().eval()
    assert codes(model, model.data(8), ()) == {}


@pytest.mark.parametrize("network", NETWORKS)
def test_statistics_that_were_reset(network: type[nn.Module]) -> None:
    """Trained weights, fresh statistics; one batch was counted, as it is after a reset and a step."""
    model, x = seen(network)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
            module.num_batches_tracked.fill_(1)
    found = codes(model, x)
    assert found["NP705"] == "warning"


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(("value", "severity"), [(0.0, "error"), (float("nan"), "error"), (-1.0, "error")])
def test_broken_variances(network: type[nn.Module], value: float, severity: str) -> None:
    model, x = seen(network)
    model.first.running_var.fill_(value)
    assert codes(model, x, ())["NP705"] == severity


@pytest.mark.parametrize("network", NETWORKS)
def test_frozen_norms_that_thaw(network: type[nn.Module]) -> None:
    model, x = seen(network)
    model.train()
    assert "NP706" not in codes(model, x, ())
    model.first.eval()
    assert codes(model, x, ())["NP706"] == "warning"
    model.first.train().requires_grad_(False)
    assert codes(model, x, ())["NP706"] == "warning"
    model.requires_grad_(False)
    assert "NP706" not in codes(model, x, ())


@pytest.mark.parametrize("network", NETWORKS)
def test_a_gap_of_stored_statistics_far_from_the_data(network: type[nn.Module]) -> None:
    model, x = seen(network)
    model.first.running_mean.add_(3 * model.first.running_var.sqrt())
    found = codes(model, x)
    assert found["NP701"] in ("warning", "note")
    assert found["NP705"] == "note"


def test_a_pooled_map_of_one_sample_cannot_be_trained_on() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
    model, x = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 2)), torch.randn(1, 3, 9, 9)
    (found,) = [f for f in probe(model, x).findings if f.code == "NP702" and f.severity.value == "warning"]
    assert found.where == "4"
    assert "NP702" not in codes(model.eval(), x, ())


def test_a_negative_variance_comes_before_the_nan_that_it_makes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    model[1].running_var.fill_(-1.0)  # type: ignore[union-attr, operator]
    report = probe(model, torch.randn(4, 3, 8, 8))
    errors = [f.code for f in report.findings if f.severity.value == "error"]
    assert errors == ["NP705", "NP504"]
