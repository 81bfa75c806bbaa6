"""The output that a model is for, among losses and states."""

from __future__ import annotations

import torch

from normprobe.measures.main_output import main_output

LOSS, LOGITS, HIDDEN = torch.tensor(1.0), torch.zeros(2, 3, 5), torch.zeros(2, 3, 4)


def test_logits_by_name_come_before_what_stands_first() -> None:
    assert main_output({"loss": LOSS, "hidden": HIDDEN, "logits": LOGITS}) is LOGITS


def test_a_loss_is_passed_over() -> None:
    assert main_output((LOSS, HIDDEN, LOGITS)) is HIDDEN
    assert main_output(HIDDEN) is HIDDEN


def test_numbers_and_integers_alone_are_none() -> None:
    assert main_output((LOSS, torch.zeros(2, 3, dtype=torch.long))) is None
