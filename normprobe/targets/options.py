"""What the user asks of a target, and what a target becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from normprobe.errors import SettingError
from normprobe.records import Skipped, Target

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TargetOptions:
    """How to load a target and which inputs to make for it.

    Attributes:
        revision: branch, tag or commit of a hub repository.
        config_only: build from the configuration with random weights; no weight file is read.
        meta: build on the meta device: shapes without memory, no weights.
        device: device of the model and its inputs.
        dtype: dtype of the model, None for the one that it was saved in.
        allow_pickle: read `pytorch_model.bin` where there are no safetensors (tensors only, nothing is run).
        trust_remote_code: run the Python code that a checkpoint brings with it.
        text, text_file: text for a language model in place of the bundled sample.
        tokens: length of each row for a language model; None for 512, or fewer where the model takes fewer.
        batch: number of rows.
        seed: seed of random weights and random inputs.
        own_weights: a model with random weights would not do, so that no message offers one.

    Raises:
        SettingError: a number is out of range, or both `text` and `text_file` are given.
    """

    revision: str | None = None
    config_only: bool = False
    meta: bool = False
    device: str = "cpu"
    dtype: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    text: str | None = None
    text_file: str | None = None
    tokens: int | None = None
    batch: int = 1
    seed: int = 0
    own_weights: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that no model can be run with."""
        for name, value in (("tokens", self.tokens), ("batch", self.batch)):
            if value is not None and value < 1:
                raise SettingError(f"{name} is out of range", expected="1 or more", found=str(value))
        if self.text is not None and self.text_file is not None:
            raise SettingError("text and text_file are both given", hint="give one of them")

    def hint(self, *ways: str) -> str | None:
        """Ways out in one line, without those by `--config-only` where random weights would not do."""
        open_ways = [way for way in ways if way and not (self.own_weights and way.startswith("--config-only"))]
        return "; ".join(open_ways) or None

    def refuse(self, why: str, *names: str) -> None:
        """Say that one of the options `names` was given and would have no effect.

        Raises:
            SettingError: one of them differs from its default.
        """
        defaults = TargetOptions()
        for name in names:
            value = getattr(self, name)
            if value != getattr(defaults, name):
                option = "--" + name.replace("_", "-")
                raise SettingError(
                    f"{option} has no effect: {why}", found=f"{name}={value!r:.80}", hint=f"leave {option} out"
                )


@dataclass(frozen=True)
class Loaded:
    """A target, ready to be probed.

    Attributes:
        model: in eval mode, on the device asked for.
        inputs: positional (tuple) or keyword (dict) arguments of one forward; None where none could be made,
            `notes` then says why.
        tokenizer: the model's own tokenizer, None where it has none.
        target: what was loaded, for the report.
        notes: what a reader must know about weights and inputs.
        missing: parameters and buffers of the model that the checkpoint did not hold (newly initialised).
        unexpected: tensors of the checkpoint that the model has no place for.
        skipped: what a report on the model cannot say, because of how it was loaded.
    """

    model: nn.Module
    inputs: tuple[Any, ...] | dict[str, Any] | None
    tokenizer: Any | None
    target: Target
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class Built:
    """What a loader hands back: a model, before it is moved and before inputs are made."""

    model: nn.Module
    source: str
    tokenizer: Any | None = None
    inputs: tuple[Any, ...] | dict[str, Any] | None = None
    revision: str | None = None
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = field(default=())
