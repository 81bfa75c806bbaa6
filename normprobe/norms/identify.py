"""Identify a norm by what it does: which elements share a statistic, which form fits, what gain, eps and dtypes."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from normprobe.capture.calls import CallSpec
from normprobe.errors import UnreadableAnatomyError
from normprobe.norms import elementwise, responses
from normprobe.norms.fit import LARGE, Fit, fit, odd_parts, rows
from normprobe.norms.layout import Layout
from normprobe.norms.module_subject import ModuleSubject
from normprobe.norms.probe_layout import find_layout
from normprobe.norms.specs import statistic_spec, unknown_spec
from normprobe.norms.subject import Instance, NotComparableError, Subject
from normprobe.records import NormSpec

SEED = 1
EXACT = (torch.float64, torch.float32)


def identify_module(
    module: nn.Module, call: CallSpec, failures: list[str] | None = None
) -> NormSpec | None:
    """Identify a module by feeding rebuilt copies of it.

    Args:
        module: left as it is, bit for bit; so are random states and global flags.
        call: how it was called; the first floating tensor argument is varied, the others are held constant.
        failures: where given, the reason is appended when the module could not be rebuilt or run on its own.

    Returns:
        What the module is, names relative to it; None where it is no norm or could not be looked at.
    """
    with _no_trace(module):
        try:
            return _identify(ModuleSubject(module, call))
        except NotComparableError:
            return None
        except UnreadableAnatomyError as error:
            if failures is not None:
                failures.append(str(error))
            return None


def identify(subject: Subject) -> NormSpec | None:
    """Identify a subject, a module or a piece of a recorded graph; None where it is plainly no norm.

    Raises:
        UnreadableAnatomyError: the subject could not be rebuilt or run.
    """
    with _no_trace(None):
        try:
            return _identify(subject)
        except NotComparableError:
            return None


def _identify(subject: Subject) -> NormSpec | None:
    exact = _exact(subject)
    x = rows(subject.shape, SEED)[0].to(device=subject.device, dtype=exact.dtype)
    y = exact.call(x)
    if not bool(y.isfinite().all()) or not torch.equal(y, exact.call(x)):
        return None
    layout = find_layout(exact.call, x)
    if layout is None:
        return responses.identify(subject, exact)
    if not layout.axes:
        return _elementwise(subject, exact)
    found = fit_statistic(subject, exact, layout)
    if found is None:
        return responses.identify(subject, exact) or unknown_spec(subject, exact, layout)
    return statistic_spec(subject, exact, found)


def fit_statistic(subject: Subject, instance: Instance, layout: Layout) -> Fit | None:
    """The statistic form that the instance computes over `layout`, without mean where both fit."""
    if layout.size < 2:
        return None
    parts = odd_parts(instance, LARGE * rows(layout.shape, SEED + 1), subject.device)
    if parts is None:
        return None
    return fit(parts, layout, centred=False) or fit(parts, layout, centred=True)


def _elementwise(subject: Subject, exact: Instance) -> NormSpec | None:
    spec = elementwise.identify(subject, exact)
    if spec is None or len(exact.tensors) == len(exact.parameters):
        return spec
    try:
        trained = subject.instance(exact.dtype, SEED, train=True)
        x = rows(subject.shape, SEED)[0].to(device=subject.device, dtype=exact.dtype)
        layout = find_layout(trained.call, x)
    except (ValueError, RuntimeError) as error:
        return elementwise.from_buffers(subject, exact, spec, f"train mode does not run here: {error}")
    found = fit_statistic(subject, trained, layout) if layout is not None and layout.axes else None
    if found is not None:
        return statistic_spec(subject, trained, found, train=True)
    return elementwise.from_buffers(subject, exact, spec, None)


def _exact(subject: Subject) -> Instance:
    """The instance in the widest dtype that runs, float64 or float32."""
    for dtype in EXACT[:-1]:
        instance = subject.instance(dtype, SEED)
        try:
            instance.call(torch.ones(subject.shape, dtype=dtype, device=subject.device))
        except (RuntimeError, TypeError, ValueError):  # no float64 here; float32 is tried without a net
            continue
        return instance
    return subject.instance(EXACT[-1], SEED)


@contextmanager
def _no_trace(module: nn.Module | None) -> Iterator[None]:
    """No gradients, no autocast, no warnings from the copies; random states as they were."""
    devices = {t.device for t in module.parameters()} if module is not None else set()
    cuda = [d for d in devices if d.type == "cuda"]
    state = random.getstate()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for kind in {"cpu", *(d.type for d in cuda)}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            yield
        finally:
            random.setstate(state)
