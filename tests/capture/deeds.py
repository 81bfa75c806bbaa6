"""A module that changes itself or torch in its forward, and ways to do so."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Careless(nn.Module):
    """Runs `deed` on itself in its forward."""

    def __init__(self, deed: Callable[[Any], object]) -> None:
        super().__init__()
        self.deed = deed
        self.inner = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.tensor([1.0, float("nan"), -0.0]))
        self.register_buffer("absent", None)
        self.plain = torch.arange(3.0)
        self.count, self.cache, self.log, self.names = 0, {}, [1], {"a"}
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.deed(self)
        return self.inner(x)


def batch_norm(m: Careless) -> None:
    F.batch_norm(torch.randn(8, 3), m.norm.running_mean, m.norm.running_var, training=True)


def counts(m: Careless) -> None:
    m.count += 1
    m.norm.num_batches_tracked += 1


def caches(m: Careless) -> None:
    m.cache["key"] = torch.randn(2)
    m.log.append(2)
    m.names.add("b")


def replaces(m: Careless) -> None:
    m.cache, m.log, m.state = {"other": 1}, [], torch.randn(2)
    m.table = torch.zeros(5)
    m.absent = torch.zeros(2)


def adds_parts(m: Careless) -> None:
    m.extra = nn.Linear(2, 2)
    m.register_buffer("late", torch.zeros(1))
    m.inner.late = nn.Parameter(torch.zeros(1))
    m.new_attribute = 3


def drops_parts(m: Careless) -> None:
    del m.plain, m.table, m.norm


def writes_plain_tensors(m: Careless) -> None:
    m.plain.mul_(2)
    m.plain[0] = float("nan")
    m.table.fill_(3.0)


def clears_nan(m: Careless) -> None:
    m.table.nan_to_num_(5.0)


def flags(m: Careless) -> None:
    m.train()
    m.inner.eval()


def hooks(m: Careless) -> None:
    m.inner.register_forward_hook(lambda *a: None)
    m.norm.register_forward_pre_hook(lambda *a: None)
    m.register_full_backward_hook(lambda *a: None)


def own_forward(m: Careless) -> None:
    m.inner.forward = lambda x: x


def draws(m: Careless) -> None:
    torch.rand(3)
    random.random()
    np.random.rand()
    F.dropout(torch.ones(5), training=True)


def seeds(m: Careless) -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def backends(m: Careless) -> None:
    torch.backends.mha.set_fastpath_enabled(True)
    torch.set_grad_enabled(True)


DEEDS = (
    batch_norm,
    counts,
    caches,
    replaces,
    adds_parts,
    drops_parts,
    writes_plain_tensors,
    clears_nan,
    flags,
    hooks,
    own_forward,
    draws,
    seeds,
    backends,
)


def mixed(deed: Callable[[Any], object]) -> Careless:
    """A model partly in train mode, with gradients, hooks and a frozen parameter."""
    torch.manual_seed(0)
    model = Careless(deed)
    model.inner.train()
    model.norm.eval()
    model.training = False
    model.inner.weight.requires_grad_(False)
    model.inner.bias.grad = torch.ones(3)
    model.inner.register_forward_hook(lambda *a: None)
    return model
