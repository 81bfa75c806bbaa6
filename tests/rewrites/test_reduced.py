"""Parameters are not exchanged behind the back of `DistributedDataParallel`: two processes with gloo."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from normprobe.errors import RewriteError
from normprobe.rewrites import AddFinalNorm, AddQKNorm, FoldGains, Rewrite, make_plan
from tests.models import llama
from tests.rewrites.rewritten import no_final

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="no gloo")


def start(rank: int, world: int, file: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    torch.set_num_threads(1)


def refused(model: nn.Module, rewrites: Sequence[Rewrite], inputs: Any) -> str:
    try:
        make_plan(model, rewrites, inputs)
    except RewriteError as error:
        return str(error)
    return ""


def trained(rank: int, file: str) -> None:
    """An inner model is rewritten and then wrapped; each process trains on data of its own."""
    start(rank, 2, file)
    model, inputs = llama()
    assert "wrap it anew" in refused(DistributedDataParallel(model), [AddQKNorm()], inputs)
    model, inputs = llama()
    make_plan(model, [AddQKNorm()], inputs).apply()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.5)
    tokens = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    gain = model.model.layers[0].self_attn.q_proj.q_norm.weight.detach()
    both = [torch.zeros_like(gain) for _ in range(2)]
    distributed.all_gather(both, gain)
    assert not torch.equal(gain, torch.ones_like(gain)), "it was not trained"
    assert torch.equal(*both), "the processes drift apart"
    distributed.barrier()
    Path(f"{file}-{rank}").write_text("alike")
    os._exit(0)  # threads of gloo may still run, and taking them down now and then ends the process by a signal


@pytest.mark.skipif(sys.platform == "win32", reason="files as a meeting point")
def test_what_is_rewritten_before_it_is_wrapped_trains_alike_on_two_processes(tmp_path: Path) -> None:
    multiprocessing.spawn(trained, args=(str(tmp_path / "meet"),), nprocs=2)
    assert [(tmp_path / f"meet-{rank}").read_text() for rank in range(2)] == ["alike", "alike"]


def test_parameters_are_exchanged_nowhere_inside_a_wrapper(tmp_path: Path) -> None:
    start(0, 1, str(tmp_path / "meet"))
    try:
        model, inputs = no_final(llama)()
        wrapped = DistributedDataParallel(model)
        told = refused(wrapped, [AddFinalNorm()], inputs)
        assert "AddFinalNorm would change which parameters there are inside the model" in told
        assert "found: DistributedDataParallel around module.lm_head.final_norm.weight" in told
        make_plan(wrapped, [FoldGains()], inputs).apply()  # the parameters stay the same
        beside = nn.ModuleDict({"in": DistributedDataParallel(nn.Linear(2, 2)), "out": model})
        beside.forward = lambda **inputs: model(**inputs)  # type: ignore[method-assign]
        make_plan(beside, [AddFinalNorm()], inputs)
    finally:
        distributed.destroy_process_group()
