"""Trains the model that `normprobe demo` examines, and writes its weights.

    python examples/train_demo.py --out normprobe/demo/model.safetensors

One run takes about ten minutes on one core. The same seed gives the same weights on the same machine and
PyTorch release; elsewhere the order of floating-point sums may differ, and with it the last digits.
The text is described in `examples/data/README.md`.
"""

from __future__ import annotations

import argparse
import bz2
import time
from collections.abc import Iterator
from math import cos, log, pi, sqrt
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from normprobe.demo.model import CONTEXT, Block, Decoder, encode, heldout_text

TEXT = Path(__file__).parent / "data" / "train.txt.bz2"
PEAK_RATE, WEIGHT_DECAY, WARM_UP, BATCH = 3e-3, 0.2, 100, 32


def training_text() -> str:
    """Genesis and the four Gospels, 633,203 characters."""
    return bz2.decompress(TEXT.read_bytes()).decode("ascii")


def windows(tokens: Tensor, seed: int) -> Iterator[Tensor]:
    """Random windows of CONTEXT + 1 tokens, without end; int64 of shape (BATCH, CONTEXT + 1)."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(CONTEXT + 1)
    while True:
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH, 1), generator=generator)
        yield tokens[starts + offsets]


def initialise(model: Decoder, seed: int) -> None:
    """Unit variance through every matrix, and 1/√writes of that for the matrices that write to the stream."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    writers = {writer for block in blocks for writer in (block.attention.output, block.down)}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, generator=generator)
        elif isinstance(module, nn.Linear):
            share = len(writers) if module in writers else 1
            nn.init.normal_(module.weight, std=1 / sqrt(module.in_features * share), generator=generator)


def loss(model: Decoder, windows_BT: Tensor) -> Tensor:
    """Mean cross-entropy of the next character, in nat."""
    logits = model(windows_BT[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows_BT[:, 1:].flatten())


def bits(model: Decoder, tokens: Tensor) -> float:
    """Bits per character over consecutive windows of CONTEXT tokens; a shorter rest is left out."""
    count = (len(tokens) - 1) // CONTEXT
    inputs = tokens[: count * CONTEXT].view(count, CONTEXT)
    targets = tokens[1 : count * CONTEXT + 1].view(count, CONTEXT)
    with torch.no_grad():
        nats = sum(
            F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
            for x, y in zip(inputs.split(BATCH), targets.split(BATCH), strict=True)
        )
    return nats / (count * CONTEXT) / log(2)


def optimiser(model: Decoder) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices of the blocks, none on gains, the embedding and the head."""
    decayed = {id(module.weight) for module in model.blocks.modules() if isinstance(module, nn.Linear)}
    groups = [
        {"params": [p for p in model.parameters() if id(p) in decayed], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if id(p) not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98))


def train(model: Decoder, tokens: Tensor, steps: int, seed: int) -> None:
    """Trains in place: linear warm-up, then a cosine to zero; gradients clipped to norm 1."""
    adam = optimiser(model)
    began = time.monotonic()
    for step, batch in zip(range(steps), windows(tokens, seed), strict=False):
        rate = min((step + 1) / WARM_UP, 0.5 + 0.5 * cos(pi * step / steps))
        for group in adam.param_groups:
            group["lr"] = PEAK_RATE * rate
        value = loss(model, batch)
        adam.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        if step % 100 == 0 or step == steps - 1:
            seconds = time.monotonic() - began
            print(f"step {step:5d}  {value.item() / log(2):.3f} bits/char  {seconds:.0f} s", flush=True)


def main() -> None:
    """Trains, prints the loss on both texts, and saves the weights in float16."""
    parser = argparse.ArgumentParser(description="Train the model of `normprobe demo`.")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--final-norm", action="store_true", help="train the twin that has a final norm")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Decoder(final_norm=options.final_norm)
    initialise(model, options.seed)
    text, heldout = encode(training_text()), encode(heldout_text())
    train(model, text, options.steps, options.seed)
    weights = {name: weight.half().contiguous() for name, weight in model.state_dict().items()}
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    model.eval()
    print(f"train    {bits(model, text):.3f} bits/char")
    print(f"held out {bits(model, heldout):.3f} bits/char")
    save_file(weights, options.out)


if __name__ == "__main__":
    main()
