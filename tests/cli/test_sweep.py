"""`normprobe sweep`: what takes the steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner, Result

import normprobe
from normprobe.cli.commands import app
from normprobe.cli.options import OptimizerChoice
from normprobe.records.sweep import Optimizer
from normprobe.targets.factory import sized_factory

FACTORY = """
import torch
from torch import nn

def net(width):
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)), torch.randn(8, 3)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "made.py"
    path.write_text(FACTORY)
    return f"{path}:net"


def swept(target: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["sweep", target, "--widths", "8,16", *options], env={"COLUMNS": "100"})


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_the_optimizer_named_takes_the_steps(target: str, optimizer: Optimizer) -> None:
    factory = sized_factory(target)
    assert factory is not None
    document = json.loads(swept(target, "--optimizer", optimizer, "--format", "json").stdout)
    wanted = normprobe.coordinate_check(factory, [8, 16], optimizer=optimizer)
    assert document["optimizer"] == optimizer
    assert document == json.loads(wanted.model_dump_json())


def test_the_command_knows_the_optimizers_that_the_check_knows(target: str) -> None:
    assert tuple(choice.value for choice in OptimizerChoice) == get_args(Optimizer)
    assert "4 steps of Adam" in swept(target).stdout
    assert "4 steps of SGD" in swept(target, "--optimizer", "sgd").stdout
    refused = swept(target, "--optimizer", "lion")
    assert refused.exit_code == 2
    assert all(word in refused.stderr for word in ("lion", "adam", "sgd"))
