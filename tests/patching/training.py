"""A short training run on random tokens, and the three ways to load what is in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

import normprobe
from tests.patching.checkpoints import VOCABULARY

STEPS, SAVED = 10, 5


def ways() -> dict[str, Callable[..., Any]]:
    """By this package, by the code in the folder, and into a model with other weights."""

    def code(folder: Path, **options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **{"dtype": "auto", **options})

    return {"load": normprobe.load, "code": code, "manifest": into_another}


def into_another(folder: Path, dtype: Any = None, device_map: Any = None) -> Any:
    """A model built as the one was that was patched, with random weights, and then given what is in the folder."""
    config = AutoConfig.from_pretrained(folder)
    base = getattr(transformers, config.normprobe["base"])
    del config.normprobe, config.auto_map
    model = base._from_config(config, dtype=config.dtype if dtype is None else dtype)
    return normprobe.apply_manifest(model.to(device_map), folder).eval()


class Losses(TrainerCallback):
    """The loss of each step; it lets one checkpoint be written."""

    def __init__(self, saved: int) -> None:
        self.saved, self.found = saved, dict[int, float]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == self.saved

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.found[state.global_step] = logs["loss"]


def rows(seed: int = 1, count: int = 4 * STEPS, tokens: int = 12) -> Tensor:
    """Random tokens: (count, tokens)."""
    return torch.randint(0, VOCABULARY, (count, tokens), generator=torch.Generator().manual_seed(seed))


def losses(
    model: Any, folder: Path, ids: Tensor, resume: Path | None = None, steps: int = STEPS, saved: int = SAVED
) -> tuple[Any, dict[int, float]]:
    """Train with one checkpoint on the way, from the start or from a checkpoint of such a run.

    Args:
        model: to train.
        folder: for the checkpoint.
        ids: one batch after the other.
        resume: the checkpoint.
        steps: in all.
        saved: the step that the checkpoint is written after.

    Returns:
        The trainer, and the loss of each step that it took.
    """
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=saved,
        logging_steps=1,
        per_device_train_batch_size=len(ids) // steps,
        learning_rate=1e-3,
        seed=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    told = Losses(saved)
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[told])  # type: ignore[arg-type]
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer, told.found
