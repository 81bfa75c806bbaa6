"""One patch of a large checkpoint in this interpreter, for `benchmarks/patch.py`; and such a checkpoint."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normprobe.cli.app import settle

HIDDEN, INNER, VOCABULARY, HEADS = 4096, 11008, 32000, 32
SHARD = 2 * 10**9  # bytes
MEASURED = 32  # tokens where something is measured on them
AUDITED = f"with audits on {MEASURED} tokens"
CASES: Mapping[str, tuple[str, dict[str, Any], bool]] = {  # rewrite, its settings, whether audits are made
    "FoldGains": ("FoldGains", {}, False),
    "Initialise": ("Initialise", {"scheme": "gpt2"}, False),
    f"FoldGains, {AUDITED}": ("FoldGains", {}, True),
    f"AddQKNorm, calibrated on {MEASURED} tokens": ("AddQKNorm", {"start": "calibrated"}, False),
}
TIMED = ("FoldGains", "Initialise")  # cases that a copy of the files is the measure of


def make_checkpoint(folder: Path, size: int, dtype_name: str) -> int:
    """A Llama of at least `size` bytes, gains of its norms not 1; the bytes that it has."""
    import torch
    from transformers import LlamaForCausalLM

    from normprobe.checkpoints.header import laid_out
    from normprobe.checkpoints.output import Room, sharded
    from normprobe.checkpoints.shard import ShardWriter
    from normprobe.checkpoints.weights import SAFE_INDEX

    config = _config(size, dtype_name)
    with torch.device("meta"):
        state = LlamaForCausalLM(config).to(getattr(torch, dtype_name)).state_dict()
    folder.mkdir()
    config.save_pretrained(folder)
    files = sharded({name: Room.of(tensor) for name, tensor in state.items()}, SHARD)
    noise = 0.02 * torch.randn(2 * VOCABULARY * HIDDEN // 8, generator=torch.Generator().manual_seed(0))
    for file, rooms in files.items():
        writer = ShardWriter(folder / file, laid_out({n: (r.dtype, r.shape, r.nbytes) for n, r in rooms.items()}, {}))
        for number, name in enumerate(rooms):
            writer.put(name, _values(noise, number, state[name]))
        writer.finish()
    places = {name: file for file, rooms in files.items() for name in rooms}
    if len(files) > 1:
        (folder / SAFE_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def _config(size: int, dtype_name: str) -> Any:
    from transformers import LlamaConfig

    layer = 4 * HIDDEN**2 + 3 * HIDDEN * INNER
    width = 4 if dtype_name == "float32" else 2
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=max(1, math.ceil((size / width - 2 * VOCABULARY * HIDDEN) / layer)),
        num_attention_heads=HEADS,
        architectures=["LlamaForCausalLM"],
        dtype=dtype_name,
    )


def _values(noise: Any, number: int, like: Any) -> Any:
    """Pieces of `noise`, each tensor from another place on; gains around 1."""
    import torch

    values = torch.empty(like.shape, dtype=like.dtype)
    flat, step = values.view(-1), len(noise) - 1000
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        part.copy_(noise[number % 1000 :][: len(part)])
    return values if like.dim() > 1 else 1 + 5 * values


def run(name: str, source: str, out: str) -> dict[str, Any]:
    """Patch; seconds by stage."""
    started = time.perf_counter()
    from normprobe.patching.options import PatchOptions
    from normprobe.patching.run import patch
    from normprobe.rewrites import load
    from normprobe.targets.options import TargetOptions

    rewrite, settings, audits = CASES[name]
    stages: dict[str, float] = {"imports": 0.0}
    now, since = "imports", started

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal now, since
        moment = time.perf_counter()
        stages[now] = stages.get(now, 0.0) + moment - since
        now, since = stage, moment

    tell("load", 0, 0)
    options = PatchOptions(
        level="forward" if audits else None, target=TargetOptions(tokens=None if name in TIMED else MEASURED)
    )
    patch(source, Path(out), [load({"rewrite": rewrite, **settings})], options, tell)
    tell("", 0, 0)
    return {"stages": stages}


def main(words: list[str]) -> None:
    """`bare` imports what a patch imports; `patch CASE SOURCE OUT` patches, in a process like that of the command."""
    settle()
    if words == ["bare"]:
        import transformers.models.llama.modeling_llama  # noqa: F401

        import normprobe.patching.run  # noqa: F401
    else:
        print(json.dumps(run(*words[1:])))


if __name__ == "__main__":
    main(sys.argv[1:])
