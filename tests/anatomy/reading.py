"""Reads the Anatomy of tiny models for tests, each named one once."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

import normprobe
from normprobe.records import Anatomy, Stream
from tests.models import MODELS


def anatomy_of(model: nn.Module, inputs: Any) -> Anatomy:
    return normprobe.probe(model, inputs, level="structure").anatomy


@cache
def named(name: str) -> Anatomy:
    """The Anatomy of a model of the catalogue."""
    return anatomy_of(*MODELS[name]())


def only_stream(anatomy: Anatomy) -> Stream:
    (stream,) = anatomy.streams
    return stream
