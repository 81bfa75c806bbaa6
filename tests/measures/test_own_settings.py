"""Norms that the model's own class builds with another eps than its configuration states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normprobe

transformers = pytest.importorskip("transformers")


class Norm(nn.Module):
    """An RMSNorm that takes no eps of a configuration, and holds a setting."""

    def __init__(self, width: int, setting: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.setting = setting

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


def built(setting: Any) -> nn.Module:
    class Own(transformers.LlamaForCausalLM):  # type: ignore[name-defined,misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.input_layernorm = Norm(config.hidden_size, setting())
                layer.post_attention_layernorm = Norm(config.hidden_size, setting())
            self.model.norm = Norm(config.hidden_size, setting())

    fields = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model: nn.Module = Own(transformers.LlamaConfig(vocab_size=64, rms_norm_eps=1e-6, **fields))
    return model


class Refuses:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("setting", "severity"),
    [
        (lambda: 3, "note"),
        (Refuses, "warning"),
        (lambda: [torch.arange(3)], "warning"),  # on the meta device, where nothing can be compared
        (lambda: pytest.importorskip("numpy").arange(3), "warning"),
    ],
)
def test_settings_that_cannot_be_compared_are_not_the_same(setting: Any, severity: str) -> None:
    found = [f for f in normprobe.probe(built(setting), level="structure").findings if f.code == "NP104"]
    assert [f.severity.value for f in found] == [severity]


def test_a_class_that_cannot_be_asked_is_said() -> None:
    class Wants(transformers.LlamaForCausalLM):  # type: ignore[name-defined,misc]
        def __init__(self, config: Any, more: int) -> None:
            super().__init__(config)
            for module in self.modules():
                if hasattr(module, "variance_epsilon"):
                    module.variance_epsilon = 1e-5

    fields = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = Wants(transformers.LlamaConfig(vocab_size=64, rms_norm_eps=1e-6, **fields), 1)
    report = normprobe.probe(model, level="structure")
    assert [f.severity.value for f in report.findings if f.code == "NP104"] == ["warning"]
    (skip,) = (one for one in report.skipped if "that the class Wants builds" in one.what)
    assert "cannot be built from its configuration: TypeError" in skip.why
