"""One registered model: built small, run, probed, and its readers and writers held against it.

As a program it reads one entry a line (JSON) from standard input and answers each with JSON lines: the stage it
enters, and at last the outcome. `pool` starts it and gives each entry a time limit.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from benchmarks.flow import Held, holds, run, skips
from benchmarks.registry import Entry
from benchmarks.shrink import LEVELS, shrunken

MOST_PARAMETERS = 60_000_000
TOKENS = 24
SEED = 0
OUTCOMES = ("not built", "audited", "refused", "unsound", "crashed")
NO_STREAM = "no residual stream: no sum adds a tensor to something computed from it"


@dataclass(frozen=True)
class Outcome:
    """What became of one model; `note` says more where it is audited, the reason where it is not."""

    name: str
    outcome: str
    note: str = ""
    shrink: int = 0


@dataclass(frozen=True)
class Small:
    """A small model that runs on `inputs`, built at one level of `LEVELS`."""

    model: nn.Module
    inputs: dict[str, Tensor]
    level: int


class NotBuiltError(Exception):
    """No configuration of the model could be built and run; `refused` where only its inputs could not be made."""

    def __init__(self, reason: str, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


def attempt(entry: Entry, tell: Any = print) -> Outcome:
    """Build, run, probe and check one model."""
    from normprobe import probe
    from normprobe.errors import InputError, UnreadableAnatomyError

    tell("build")
    try:
        small = build(entry)
    except NotBuiltError as error:
        return Outcome(entry.name, "refused" if error.refused else "not built", str(error))
    tell("probe")
    try:
        anatomy = probe(small.model, small.inputs, level="structure").anatomy
    except (InputError, UnreadableAnatomyError) as error:
        return Outcome(entry.name, "refused", f"{type(error).__name__}: {_one_line(error)}", small.level)
    except Exception as error:
        return Outcome(entry.name, "crashed", where(error), small.level)
    tell("check")
    if not anatomy.streams:
        found = skips(small.model, small.inputs)
        reason = f"no stream was read, but {len(found)} sums look like residual adds: {found[0]}" if found else ""
        return Outcome(entry.name, "unsound" if found else "audited", reason or NO_STREAM, small.level)
    return _judged(entry, holds(small.model, small.inputs, anatomy), small.level)


def _judged(entry: Entry, held: Held, level: int) -> Outcome:
    if held.fault is not None:
        return Outcome(entry.name, "unsound", held.fault, level)
    note = f"{len(held.unreachable)} of {held.tried} tried branches reach no output: {', '.join(held.unreachable[:1])}"
    return Outcome(entry.name, "audited", note if held.unreachable else "", level)


def build(entry: Entry, as_drawn: bool = False) -> Small:
    """The smallest configuration of the entry that builds, runs and gives finite numbers.

    Args:
        entry: which model.
        as_drawn: leave the model as it is drawn but for parameters that it does not set: branches that start at 0 stay
            there, and statistics of batch norms where they start.

    Raises:
        NotBuiltError: none does; it says why each failed, the smallest first.
    """
    try:
        build_class, default = _class_and_config(entry)
    except Exception as error:  # whatever the library raises where a part of it is missing
        raise NotBuiltError(f"no default configuration: {type(error).__name__}: {_one_line(error)}") from error
    reasons: dict[str, None] = {}
    refused = False
    for level, groups in enumerate(LEVELS):
        try:
            return Small(*_built(build_class, _as_decoder(entry, shrunken(default, groups)), as_drawn), level)
        except Exception as error:
            refused = refused or type(error).__name__ == "InputError"
            reasons[f"{type(error).__name__}: {_one_line(error)}"] = None
    raise NotBuiltError(" · ".join(reasons), refused)


def _class_and_config(entry: Entry) -> tuple[Any, Any]:
    import transformers

    build_class = getattr(transformers, entry.class_name)
    config = transformers.CONFIG_MAPPING[entry.model_type]()
    wanted = build_class.config_class
    if not isinstance(config, wanted):
        text = config.get_text_config(decoder=True)
        config = text if isinstance(text, wanted) else wanted()
    return build_class, config


def _as_decoder(entry: Entry, config: Any) -> Any:
    """An encoder's configuration, told to mask the future where its language model is to be causal."""
    if entry.kind == "causal-lm" and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    return config


def _built(build_class: Any, config: Any, as_drawn: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    from normprobe.inputs import inputs_from_config

    with torch.device("meta"):
        count = sum(p.numel() for p in build_class(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"more than {MOST_PARAMETERS:,} parameters where less is shrunk")
    torch.manual_seed(SEED)
    with _marked_memory():
        model: nn.Module = build_class(config).float().eval()
    settle(model, unset_alone=as_drawn)
    inputs, _ = inputs_from_config(model, batch=1, seed=SEED, tokens=TOKENS)
    try:
        if not as_drawn:
            level_statistics(model, inputs)
        output = run(model, inputs)
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
        raise ValueError(f"does not run on {shapes}: {type(error).__name__}: {_one_line(error)}") from error
    if not output.isfinite().all():
        raise ValueError("the forward of the plain model gives NaN or infinity with random weights")
    return model, inputs


@contextmanager
def _marked_memory() -> Iterator[None]:
    """Memory that a constructor leaves unset is NaN, and so can be told from set parameters."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def settle(model: nn.Module, unset_alone: bool = False) -> None:
    """Give seeded values to parameters that were left unset, and to all-zero or tiny ones, which hide their branch."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            if not param.is_floating_point() or param.numel() == 0:
                continue
            if not param.isfinite().all() or (param.abs().max() < 1e-3 and not unset_alone):
                param.copy_(torch.randn(param.shape, generator=generator) * 0.05)


def level_statistics(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Set the running statistics of batch norms to those of the signal that reaches them, and their gains near one.

    With the fresh ones (mean 0, variance 1, at times a gain of 0.02) the signal of a deep convolutional model
    vanishes in rounding.
    """
    generator = torch.Generator().manual_seed(7)

    def set_running(module: Any, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach().transpose(0, 1).flatten(1)
        whole = x.var(correction=0)
        variance = x.var(1, correction=0) if x.shape[1] > 1 else whole.expand(x.shape[0])
        module.running_mean.copy_(x.mean(1) if x.shape[1] > 1 else torch.zeros(x.shape[0]))
        module.running_var.copy_(torch.where(variance > 0, variance, whole))

    norms: list[Any] = [m for m in model.modules() if getattr(m, "running_var", None) is not None]
    for norm in (norm for norm in norms if norm.weight is not None):
        with torch.no_grad():
            norm.weight.copy_(1 + 0.1 * torch.randn(norm.weight.shape, generator=generator))
    handles = [norm.register_forward_pre_hook(set_running) for norm in norms]
    try:
        run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()


def where(error: BaseException) -> str:
    """Type, message and the innermost place inside normprobe of an exception."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/normprobe/" in f.filename]
    place = ""
    if frames:
        place = f" at normprobe/{frames[-1].filename.rsplit('/normprobe/', 1)[1]}:{frames[-1].lineno}"
    return f"{type(error).__name__}: {_one_line(error)}{place}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def answers() -> TextIO:
    """The standard output for answers alone; what models print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def main() -> None:
    """Answer entries until standard input ends."""
    out = answers()
    torch.set_num_threads(1)
    for line in sys.stdin:
        entry = Entry(**json.loads(line))
        outcome = attempt(entry, lambda stage: print(json.dumps({"stage": stage}), file=out))
        print(json.dumps(asdict(outcome)), file=out)


if __name__ == "__main__":
    main()
