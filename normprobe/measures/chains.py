"""The signal from block to block in one forward with gradients: its states, and their places in autograd's graph.

A chain has one state before its first block and one after each: for a residual stream the trunk at its first add and
the sum of the last add of every block; for a model without one the inputs of its layers and the output of the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import split
from normprobe.capture.watch import Handler, Watched, watch
from normprobe.capture.wrappers import wrapped_forwards
from normprobe.measures import tokens
from normprobe.measures.ancestry import nodes
from normprobe.measures.extra import Subject
from normprobe.measures.finite import floats
from normprobe.measures.padding import padding_masks
from normprobe.measures.runs import blocks_of
from normprobe.measures.stand_ins import differentiated, stand_ins
from normprobe.measures.trunk import Trunk
from normprobe.records import Branch, OpSite, Skipped, Stream


@dataclass(frozen=True)
class State:
    """One state of the signal; the tensor itself is not kept. `rms` leaves padding out and is in the signal's unit, of
    `count` entries."""

    trunk: Trunk
    rms: float
    count: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    edge: GradientEdge

    @classmethod
    def of(cls, x: Tensor, trunk: Trunk) -> State | None:
        """The state that `x` is; None where autograd does not know it."""
        if not (x.requires_grad and x.is_floating_point()):
            return None
        x_BSC = trunk.states(x)
        count = trunk.tokens(x_BSC).number * x_BSC.shape[-1]
        return cls(trunk, rms(x, trunk), count, x.shape, x.dtype, x.device, get_gradient_edge(x))


@dataclass(frozen=True)
class Step:
    """From the state before one block to the state after it; `execution` counts the runs of a block, from 0. `until`
    says where the step ends if that is farther than the block."""

    block: str
    execution: int
    start: State
    end: State
    until: str | None = None

    @property
    def ends(self) -> str:
        """The name of `end`."""
        return self.until or f"after {self.block}"


@dataclass(frozen=True)
class Chain:
    """The steps of one stream, in order."""

    name: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Held:
    """One forward whose graph is held.

    Attributes:
        chains: those with at least one step.
        output: what the model returned.
        source: the model's first input, where it is floating point.
        target: the first floating point tensor of the output.
        skipped: blocks that are in no chain, with the reason.
    """

    chains: tuple[Chain, ...]
    output: Any
    source: State | None
    target: State | None
    skipped: tuple[Skipped, ...]


def rms(x: Tensor, trunk: Trunk) -> float:
    """√(mean of x² over all features of the tokens that are no padding), float64 between tokens."""
    x_BSC = trunk.states(x)
    norms_N, kept = tokens.norms(x_BSC), trunk.tokens(x_BSC).kept
    chosen = norms_N if kept is None else norms_N[kept]
    return math.sqrt(float(chosen.double().square().mean()) / x_BSC.shape[-1])


def depends(end: GradientEdge | None, start: GradientEdge) -> bool:
    """Whether autograd finds a way from `end` back to `start`."""
    return end is not None and any(node is start.node for node in nodes(end.node))


def differentiable(model: nn.Module) -> str | None:
    """Why no gradient can be taken of this model; None where one can."""
    if any(p.device.type == "meta" for p in model.parameters()):
        return "tensors on the meta device hold no numbers"
    return (
        None if any(p.is_floating_point() for p in model.parameters()) else "the model has no floating point parameters"
    )


@contextmanager
def held(subject: Subject) -> Iterator[Held]:
    """Run the model once with gradients, in eval mode and with stand-ins for its parameters, and hold the graph.

    Memory: all activations, until the end of the block. The model is left bit for bit as it was.

    Raises:
        UndifferentiableError: if the model does not run with gradients.
    """
    everything, padding = subject.anatomy.streams, padding_masks(subject.inputs)
    streams = [stream for stream in everything if None not in {b.feature_axis for b in stream.branches}]
    seen = [_blocks(stream, padding) for stream in streams]
    layers, sources = _Layers(), _Sources(subject)
    handlers: dict[OpSite, Handler] = {add.site: add for blocks in seen for block in blocks for add in block.adds}
    with untouched(subject.model), stand_ins(subject.model):
        with differentiated("model"), wrapped_forwards(subject.model, layers.around if not streams else _plain):
            watched = watch(subject.model, subject.inputs, handlers, grad=True, place=sources.place)
        target = next((t for t in floats(watched.output) if t.requires_grad and t.numel() and t.dim()), None)
        found = [_chain(stream, blocks, watched) for stream, blocks in zip(streams, seen, strict=True)]
        if not streams and target is not None:
            found.append((layers.chain(target), []))
        found += [(Chain(s.name, ()), [_untold(s)]) for s in everything if s not in streams]
        yield Held(
            chains=tuple(chain for chain, _ in found if chain.steps),
            output=watched.output,
            source=sources.first,
            target=None if target is None else State.of(target, Trunk(-1)),
            skipped=tuple(skip for _, skips in found for skip in skips),
        )


class _Add(Handler):
    """The sum after one add, and the trunk before it where it is the first of its stream."""

    def __init__(self, branch: Branch, trunk: Trunk, first: bool) -> None:
        self.site, self.operand, self.trunk, self.first = branch.add, branch.trunk, trunk, first and branch.apart
        self.entry: State | None = None
        self.state: State | None = None
        self.write: GradientEdge | None = None
        self._output: Tensor | None = None

    def before(self, arguments: Any) -> None:
        operands = [value for value in arguments.values() if isinstance(value, Tensor)]
        if self.first and len(operands) == 2 and operands[1 - self.operand].requires_grad:
            self.entry = State.of(operands[self.operand], self.trunk)
            self.write = get_gradient_edge(operands[1 - self.operand])

    def after(self, arguments: Any, output: Any) -> None:
        self._output = output

    def settled(self) -> None:
        output, self._output = self._output, None
        self.state = None if output is None else State.of(output, self.trunk)


@dataclass(frozen=True)
class _Block:
    """One run of a block: its first add where the stream begins with it, and its last."""

    name: str
    execution: int
    adds: tuple[_Add, ...]


def _blocks(stream: Stream, padding: Sequence[Tensor]) -> list[_Block]:
    blocks: list[_Block] = []
    trunks = {b.feature_axis: Trunk(-1 if b.feature_axis is None else b.feature_axis, padding) for b in stream.branches}
    for run in blocks_of(stream):
        first, last = run.branches[0], run.branches[-1]
        ends = [_Add(last, trunks[last.feature_axis], not blocks and first.add == last.add)]
        if not blocks and first.add != last.add:
            ends.insert(0, _Add(first, trunks[first.feature_axis], True))
        blocks.append(_Block(run.name, run.execution, tuple(ends)))
    return blocks


def _untold(stream: Stream) -> Skipped:
    why = "the axis of its features could not be told from the data flow"
    return Skipped(what=f"residual stream {stream.name}", why=why)


def _chain(stream: Stream, blocks: Sequence[_Block], watched: Watched) -> tuple[Chain, list[Skipped]]:
    first = blocks[0].adds[0]
    entry = first.entry
    if entry is not None and not depends(first.write, entry.edge):
        entry = None  # a copy of what the branch reads, or scaled
    states = [entry, *(block.adds[-1].state for block in blocks)]
    steps, skipped = [], []
    for block, (start, end) in zip(blocks, pairwise(states), strict=True):
        if start is not None and end is not None:
            steps.append(Step(block.name, block.execution, start, end))
            continue
        why = watched.reason(block.adds[-1].site) or watched.reason(first.site)
        if why is None:
            why = "what enters it is not seen: the first add has a copy or a multiple of it"
            why = why if block is blocks[0] and end is not None else "autograd does not know the stream there"
        skipped.append(Skipped(what=f"block {block.name} of the residual stream {stream.name}", why=why))
    return Chain(stream.name, tuple(steps)), skipped


class _Sources:
    """Gives the first input a gradient where it is floating point."""

    def __init__(self, subject: Subject) -> None:
        self.first: State | None = None
        leaves = [leaf for leaf in pytree.tree_leaves(split(subject.inputs)) if isinstance(leaf, Tensor)]
        self.wanted = bool(leaves) and leaves[0].is_floating_point()

    def place(self, tensor: Tensor) -> Tensor:
        if not self.wanted:
            return tensor
        self.wanted = False
        tracked = tensor.detach().requires_grad_().clone()  # no leaf: a forward may write into it
        self.first = State.of(tracked, Trunk(-1))
        return tracked


@dataclass(frozen=True)
class _Layer:
    """One run of a layer: what went in, and the places in autograd's graph of what it `made`."""

    path: str
    run: int
    state: State
    made: tuple[Any, ...]

    @property
    def name(self) -> str:
        return f"{self.path}, run {self.run + 1}" if self.run else self.path


class _Layers:
    """Keeps what goes into every layer, that is, every module without others inside that holds a matrix."""

    def __init__(self) -> None:
        self.seen: list[_Layer] = []
        self.runs: dict[str, int] = {}

    def around(self, path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        matrices = any(p is not None and p.dim() > 1 for p in module._parameters.values())
        if not matrices or list(module.children()):
            return forward(*args, **kwargs)
        x = next(iter(floats((args, kwargs))), None)
        state = None if x is None else State.of(x, Trunk(-1))
        output = forward(*args, **kwargs)
        run = self.runs[path] = self.runs.get(path, -1) + 1
        if state is not None:
            made = tuple(get_gradient_edge(y)[:2] for y in floats(output) if y.requires_grad)
            self.seen.append(_Layer(path, run, state, made))
        return output

    def chain(self, target: Tensor) -> Chain:
        """The layers that follow from each other; from the input of one to the input of the next."""
        ends = [(f"before {one.name}", one.state) for one in self.seen[1:]]
        ends += [("output", end)] if (end := State.of(target, Trunk(-1))) is not None else []
        steps = [
            Step(layer.path, layer.run, layer.state, end, None if end.edge[:2] in layer.made else until)
            for layer, (until, end) in zip(self.seen, ends, strict=False)
            if depends(end.edge, layer.state.edge)
        ]
        return Chain(".", tuple(steps))


def _plain(path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)
