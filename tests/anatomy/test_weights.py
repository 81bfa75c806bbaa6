"""Readers, writers and head rows held against the model itself: what they name is what moves the output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normprobe.records import AttentionSite, Branch, HeadRows
from tests.anatomy.reading import anatomy_of
from tests.models import MODELS, bloom, gpt2, llama, neox

# ---- readers and writers


def outputs(model: nn.Module, inputs: Any) -> Tensor:
    with torch.no_grad():
        out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return (out.logits if hasattr(out, "logits") else out).clone()


@contextmanager
def restored(parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    kept = {name: p.detach().clone() for name, p in parameters.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(kept[name])


@torch.no_grad()
def noise(parameters: dict[str, nn.Parameter], names: tuple[str, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    for name in names:
        p = parameters[name]
        p.add_(torch.randn(p.shape, generator=generator))


@torch.no_grad()
def silence(parameters: dict[str, nn.Parameter], names: tuple[str, ...]) -> None:
    for name in names:
        parameters[name].zero_()


def moves(model: nn.Module, inputs: Any, parameters: dict[str, nn.Parameter], names: tuple[str, ...]) -> bool:
    before = outputs(model, inputs)
    noise(parameters, names)
    return not torch.equal(before, outputs(model, inputs))


def fault(model: nn.Module, inputs: Any, branch: Branch) -> str | None:
    """What is wrong with the readers and writers of a branch, None if they hold."""
    parameters = dict(model.named_parameters())
    with restored(parameters):
        if not moves(model, inputs, parameters, branch.readers):
            return "the readers do not move the output"
    for reader in branch.readers:
        with restored(parameters):
            silence(parameters, branch.writers)
            if moves(model, inputs, parameters, (reader,)):
                return f"{reader} moves the output though the writers are zero"
    for writer in branch.writers:
        with restored(parameters):
            if not moves(model, inputs, parameters, (writer,)):
                return f"{writer} does not move the output"
    return None


@pytest.mark.parametrize("name", MODELS)
def test_readers_act_through_writers_alone(name: str) -> None:
    model, inputs = MODELS[name]()
    found = anatomy_of(model, inputs)
    branches = [b for stream in found.streams for b in (stream.branches[0], *stream.branches[-2:])]
    assert {b.path: fault(model, inputs, b) for b in branches} == {b.path: None for b in branches}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_but_the_readers_reads_the_norm_before_a_branch(name: str) -> None:
    model, inputs = MODELS[name]()
    found, parameters = anatomy_of(model, inputs), dict(model.named_parameters())
    branches = [b for stream in found.streams for b in stream.branches[:3] if b.pre_norm]
    for branch in branches:
        norm = found.norm(branch.pre_norm)
        gains = tuple(n for n in (norm.weight, norm.bias) if n)
        with restored(parameters):
            assert moves(model, inputs, parameters, gains)
        with restored(parameters):
            silence(parameters, branch.readers)
            assert not moves(model, inputs, parameters, gains), branch.path


def test_wrong_readers_or_writers_would_be_seen() -> None:
    model, inputs = gpt2()
    attention, mlp, *_ = anatomy_of(model, inputs).streams[0].branches
    swapped = attention.model_copy(update={"writers": mlp.writers})
    assert "though the writers are zero" in str(fault(model, inputs, swapped))
    halved = attention.model_copy(update={"writers": attention.writers[:1]})
    assert "though the writers are zero" in str(fault(model, inputs, halved))


# ---- head rows


def rows(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


def moved(found: HeadRows, order: list[int]) -> tuple[list[int], list[int]]:
    """Rows to write and rows to take them from, where head `i` gets what head `order[i]` had."""
    targets = [r for head in found.heads for r in rows(head)]
    return targets, [r for i in order for r in rows(found.heads[i])]


@torch.no_grad()
def put(tensor: Tensor, axis: int, targets: list[int], sources: list[int]) -> None:
    taken = tensor.index_select(axis, torch.tensor(sources)).clone()
    tensor.index_copy_(axis, torch.tensor(targets), taken)


def permute_rows(model: nn.Module, found: HeadRows, order: list[int]) -> None:
    targets, sources = moved(found, order)
    put(model.get_parameter(found.parameter), found.axis, targets, sources)
    bias = dict(model.named_parameters()).get(found.parameter.removesuffix("weight") + "bias")
    if bias is not None:
        put(bias, 0, targets, sources)


def permute_output(model: nn.Module, weight: str, axis: int, order: list[int], head_dim: int) -> None:
    sources = [head * head_dim + d for head in order for d in range(head_dim)]
    put(model.get_parameter(weight), axis, list(range(len(sources))), sources)


def permute_heads(model: nn.Module, site: AttentionSite, output: str) -> None:
    """Reverse the groups of heads that share a key, and the heads within each."""
    share = site.heads // site.kv_heads
    groups = list(reversed(range(site.kv_heads)))
    queries = [g * share + h for g in groups for h in reversed(range(share))]
    permute_rows(model, site.columns["q"], queries)
    for name in ("k", "v"):
        found = site.columns[name]
        permute_rows(model, found.model_copy(update={"heads": tuple(dict.fromkeys(found.heads))}), groups)
    axis = 1 - site.columns["q"].axis  # a Linear holds (out, in), GPT-2's Conv1D (in, out)
    permute_output(model, output, axis, queries, site.head_dim)


def without_alibi() -> tuple[nn.Module, Any]:
    """BLOOM without the bias that tells its heads apart."""
    model, inputs = bloom()
    bias = model.transformer.build_alibi_tensor
    model.transformer.build_alibi_tensor = lambda *args, **kwargs: torch.zeros_like(bias(*args, **kwargs))
    return model, inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}  # with a mask it asks the method


HEADED = {
    "gpt2": (gpt2, "c_proj.weight"),
    "llama": (llama, "o_proj.weight"),
    "llama_eager": (lambda: llama(attn_implementation="eager"), "o_proj.weight"),
    "neox": (lambda: neox(True), "dense.weight"),
    "bloom": (without_alibi, "dense.weight"),
}


@pytest.mark.parametrize("name", HEADED)
def test_heads_can_be_permuted_by_the_rows_named(name: str) -> None:
    build, output = HEADED[name]
    model, inputs = build()
    model.double()
    before = outputs(model, inputs)
    for site in anatomy_of(model, inputs).attention:
        permute_heads(model, site, f"{site.path}.{output}")
        middle = outputs(model, inputs)
        assert (middle - before).abs().max() < 1e-10


@pytest.mark.parametrize("name", HEADED)
def test_permuting_less_than_all_rows_moves_the_output(name: str) -> None:
    build, output = HEADED[name]
    model, inputs = build()
    model.double()
    before = outputs(model, inputs)
    site = anatomy_of(model, inputs).attention[0]
    for left_out in ("q", "k", "v"):
        with restored(dict(model.named_parameters())):
            permute_heads(model, site, f"{site.path}.{output}")
            found = site.columns[left_out]
            heads = tuple(dict.fromkeys(found.heads))
            permute_rows(model, found.model_copy(update={"heads": heads}), list(reversed(range(len(heads)))))
            assert (outputs(model, inputs) - before).abs().max() > 1e-4
