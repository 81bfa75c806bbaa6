"""Faults planted in tiny models by what the Anatomy says of them, and the findings of one check."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import normprobe
from normprobe.checks import find, run
from normprobe.records import Anatomy, Finding, ReportData, Skipped
from tests import models

PRE: dict[str, Callable[[], models.Built]] = {
    "gpt2": models.gpt2,
    "llama": models.llama,
    "gemma2": models.gemma2,
    "qwen3": models.qwen3,
    "by hand": lambda: models.decoder("pre"),
}


def anatomy(model: nn.Module, inputs: Any) -> Anatomy:
    return normprobe.probe(model, inputs, level="structure").anatomy


def found(code: str, model: nn.Module, inputs: Any, level: Any = "structure") -> tuple[Finding, ...]:
    """The findings of one check."""
    return tuple(f for f in normprobe.probe(model, inputs, level=level).findings if f.code == code)


def codes(model: nn.Module, inputs: Any) -> set[str]:
    """The codes of all findings about placement."""
    return {f.code for f in normprobe.probe(model, inputs, level="structure").findings if f.code.startswith("NP2")}


def judge(code: str, data: ReportData) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    return run(data, checks=[find(code)])


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def final_norm(model: nn.Module, inputs: Any) -> str:
    (stream,) = anatomy(model, inputs).streams
    assert stream.final_norm is not None
    return stream.final_norm


def last_block(model: nn.Module, inputs: Any) -> nn.Module:
    (stream,) = anatomy(model, inputs).streams
    return model.get_submodule(stream.branches[-1].block)


def norm_before(block: nn.Module, norm: nn.Module) -> None:
    """Have `norm` on the trunk that goes into `block`."""
    block.add_module("planted", norm)

    def through(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (norm(args[0]), *args[1:])

    block.register_forward_pre_hook(through)


def twin(model: nn.Module, path: str) -> nn.Module:
    return copy.deepcopy(model.get_submodule(path))
