"""Models whose width makes a difference that it should not make: planted through the Anatomy at every width of a sweep.

The faults of `tests.faults.operators` are in one model each; these are in a row of them, which a sweep trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

import normprobe
from normprobe.records import Anatomy, Severity
from normprobe.records.sweep import SweepReport
from tests.faults.architectures import transformer
from tests.faults.edits import behind, module_at
from tests.faults.fault import NotHereError
from tests.faults.running import Built, Outcome, Said
from tests.models import SMALL, VOCABULARY, ids

SIZES, STEPS, RATE = (64, 128, 256), 3, 0.01
CODE = "NP607"


def gpt2(width: int) -> Built:
    small = {"vocab_size": VOCABULARY, "n_positions": 32, "n_layer": 2, "n_head": width // 16}
    return transformer("GPT2LMHeadModel", "GPT2Config", n_embd=width, bos_token_id=1, eos_token_id=2, **small)


def llama(width: int) -> Built:
    grown = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 16}
    return transformer("LlamaForCausalLM", "LlamaConfig", **SMALL | grown)


def bert(width: int) -> Built:
    grown = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 16}
    return transformer("BertForMaskedLM", "BertConfig", **SMALL | grown)


class Perceptrons(nn.Module):
    """Two pre-norm branches on a stream, between an embedding and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=False):
            x = x + down(torch.relu(up(norm(x))))
        return self.head(self.norms[-1](x))  # type: ignore[no-any-return]


def perceptrons(width: int) -> Built:
    torch.manual_seed(0)
    return Perceptrons(width).eval(), ids()


BUILDS: dict[str, Callable[[int], Built]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "perceptrons": perceptrons}


@dataclass(frozen=True)
class WidthFault:
    """A factor of the width that no parameter holds.

    Attributes:
        name: what was done, in words.
        place: the module behind which it is, by the Anatomy.
        power: of the width over the smallest.
    """

    name: str
    place: Callable[[Anatomy], str | None]
    power: float


def of_parameter(name: str | None) -> str | None:
    """The module that holds a parameter."""
    return None if name is None else name.rpartition(".")[0]


def first_source(anatomy: Anatomy) -> str | None:
    return of_parameter(anatomy.streams[0].source) if anatomy.streams else None


def first_writer(anatomy: Anatomy) -> str | None:
    """What writes first to the stream, a matrix."""
    writers = [name for s in anatomy.streams[:1] for name in s.branches[0].writers if name.endswith("weight")]
    return of_parameter(writers[0]) if writers else None


def first_norm(anatomy: Anatomy) -> str | None:
    return next((b.pre_norm for s in anatomy.streams[:1] for b in s.branches if b.pre_norm is not None), None)


def head(anatomy: Anatomy) -> str | None:
    """A head of its own; of one that shares the table muP divides the logits, and takes the factor back."""
    own = anatomy.head is not None and anatomy.head.tied_to is None
    return of_parameter(anatomy.head.path) if own and anatomy.head else None


FAULTS = (
    WidthFault("a table times the root of the width", first_source, 0.5),
    WidthFault("a norm times the root of the width", first_norm, 0.5),
    WidthFault("a write over the width", first_writer, -1.0),
    WidthFault("logits times the width", head, 1.0),
)


def swept(build: Callable[[int], Built], fault: WidthFault | None = None) -> SweepReport:
    """What a sweep says of the models, with the fault in each where there is one."""
    site = None if fault is None else fault.place(_anatomy(build))

    def made(width: int) -> Built:
        model, inputs = build(width)
        if fault is not None:
            if site is None or not dict(model.named_modules()).get(site, ""):
                raise NotHereError("no such place")
            factor = (width / SIZES[0]) ** fault.power
            behind(module_at(model, site), lambda x: x * factor)
        return model, inputs

    return normprobe.coordinate_check(made, SIZES, steps=STEPS, lr=RATE)


@cache
def _anatomy(build: Callable[[int], Built]) -> Anatomy:
    return normprobe.probe(*build(SIZES[0]), level="structure").anatomy


@cache
def sound(build: Callable[[int], Built]) -> SweepReport:
    """The sweep over the models as they are built."""
    return swept(build)


def warned(report: SweepReport) -> Iterator[tuple[Any, str]]:
    """Limit and place of every warning."""
    for finding in report.findings:
        if finding.severity is Severity.WARNING:
            yield from ((finding.limit, place) for place in finding.every_place)


def judged(name: str, fault: WidthFault) -> Outcome | None:
    """What became of `fault` in the models of this name; None where it has no place in them."""
    build = BUILDS[name]
    site = fault.place(_anatomy(build))
    try:
        report = swept(build, fault)
    except Exception as error:
        if site is None or isinstance(error.__cause__, NotHereError):
            return None
        return Outcome(fault.name, CODE, name, site or "?", "does not run", f"{type(error).__name__}: {error}"[:300])
    fresh = set(warned(report)) - set(warned(sound(build)))
    here = any((limit > 0) is (fault.power > 0) and place == site for limit, place in fresh)
    said: Said = "found" if here else "missed"
    return Outcome(fault.name, CODE, name, site or "?", said, "" if here else f"{len(fresh)} others")
