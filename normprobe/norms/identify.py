"""Identify a norm by what it does: what shares a statistic, which form fits, which gain, eps and dtypes."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from normprobe.capture.calls import CallSpec
from normprobe.errors import UnreadableAnatomyError
from normprobe.norms import elementwise, responses, stored, unfitted
from normprobe.norms.eps import rounded
from normprobe.norms.fit import LARGE, PRECISE, Fit, fit, fit_scaled, odd_parts, rows
from normprobe.norms.layout import Layout
from normprobe.norms.module_subject import SIDE, ModuleSubject, Tail
from normprobe.norms.probe_layout import find_layout
from normprobe.norms.specs import statistic_spec
from normprobe.norms.subject import Instance, NotComparableError, Subject
from normprobe.records import NormSpec

SEED = 1
EXACT = (torch.float64, torch.float32)


def identify_module(
    module: nn.Module, call: CallSpec, failures: list[str] | None = None, tail: Tail | None = None
) -> NormSpec | None:
    """Identify a module by feeding rebuilt copies of it.

    Args:
        module: left as it is, bit for bit; so are random states and global flags.
        call: how it was called; the first floating tensor argument is varied, the others are held constant.
        failures: where given, the reason is appended when the module could not be rebuilt or run on its own.
        tail: the activation that the module ends in, where what comes before it is to be identified.

    Returns:
        What the module is, names relative to it; None where it is no norm or could not be looked at.
    """
    tensors = [*module.parameters(), *module.buffers()]
    with _no_trace(tensor.device for tensor in tensors):
        try:
            return _with_sides(module, call, tail)
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
    with _no_trace([subject.device]):
        try:
            return _identify(subject)
        except NotComparableError:
            return None


def _with_sides(module: nn.Module, call: CallSpec, tail: Tail | None) -> NormSpec | None:
    """Identify a module; other floating arguments may gate the input, which changes eps, or be added."""
    subject = ModuleSubject(module, call, tail=tail)
    spec = _identify(subject)
    if not subject.sides:
        return spec
    if spec is None or spec.eps_placement == "unknown":
        plain = _identify(ModuleSubject(module, call, 0.0, tail))
        clear = plain is not None and (spec is None or plain.eps_placement != "unknown")
        return _told(plain, "other arguments held at 0") if plain is not None and clear else spec
    half = _identify(ModuleSubject(module, call, SIDE / 2, tail))
    return _ungated(spec, half)


def _ungated(spec: NormSpec, half: NormSpec | None) -> NormSpec:
    """`spec` with the eps that acts on the gated input, told by a run with the gate at half its value."""
    spec = _told(spec, f"other arguments held at {SIDE:g}")
    if spec.eps is None or half is None or half.eps is None:
        return spec
    power = 2 if spec.eps_placement == "inside_sqrt" else 1
    ratio = half.eps / spec.eps
    if abs(ratio - 1) < 0.05:
        return spec
    if abs(ratio - 2**power) > 0.05 * 2**power:
        told = f"eps changes with another argument, from {spec.eps:.4g} to {half.eps:.4g} at half its value"
        return _told(spec.model_copy(update={"eps": None, "eps_placement": "unknown"}), told)
    eps = rounded(spec.eps * SIDE**power, 0.0)
    told = f"another argument gates the input, by {SIDE:g} here; eps on the gated input is {eps:.4g}"
    return _told(spec.model_copy(update={"eps": eps}), told)


def _told(spec: NormSpec, sentence: str) -> NormSpec:
    return spec.model_copy(update={"evidence": (*spec.evidence, sentence)})


def _identify(subject: Subject) -> NormSpec | None:
    if 0 in subject.shape:  # an empty call that the subject takes in no other shape tells nothing
        return None
    exact = _exact(subject)
    x = rows(subject.shape, SEED)[0].to(device=subject.device, dtype=exact.dtype)
    if not bool(exact.call(x).isfinite().all()):
        return None
    layout = find_layout(exact.call, x)
    if layout is None:
        return responses.identify(subject, exact) or unfitted.identify(subject, exact, None)
    if not layout.axes:
        return _elementwise(subject, exact)
    found = fit_statistic(subject, exact, layout)
    if found is None:
        return responses.identify(subject, exact) or unfitted.identify(subject, exact, layout)
    spec = statistic_spec(subject, exact, found)
    return None if spec.eps_placement == "clamp" and _clips(exact, x) else spec


def _clips(exact: Instance, x: torch.Tensor) -> bool:
    """Whether rows are only clipped to a length: short ones come out as they went in."""
    short = 1e-6 * x
    return torch.allclose(exact.call(short), short, rtol=1e-4, atol=0.0)


def fit_statistic(subject: Subject, instance: Instance, layout: Layout) -> Fit | None:
    """The statistic form that the instance computes over `layout`, without mean where both fit."""
    if layout.size < 2:
        return None
    parts = odd_parts(instance, LARGE * rows(layout.shape, SEED + 1), subject.device)
    if parts is None:
        return None
    found = fit(parts, layout, centred=False) or fit(parts, layout, centred=True)
    if found is not None and found.residual <= PRECISE:
        return found
    return fit_scaled(parts, layout, centred=False) or fit_scaled(parts, layout, centred=True) or found


def _elementwise(subject: Subject, exact: Instance) -> NormSpec | None:
    spec = elementwise.identify(subject, exact)
    if spec is None or len(exact.tensors) == len(exact.parameters):
        return spec
    try:
        trained = subject.instance(exact.dtype, SEED, train=True)
        x = rows(subject.shape, SEED)[0].to(device=subject.device, dtype=exact.dtype)
        layout = find_layout(trained.call, x)
    except (ValueError, RuntimeError) as error:
        return stored.identify(subject, exact, f"train mode does not run here: {error}") or spec
    found = fit_statistic(subject, trained, layout) if layout is not None and layout.axes else None
    if found is not None:
        return statistic_spec(subject, trained, found, train=True)
    alike = layout is not None and not layout.axes
    return stored.identify(subject, exact, None if alike else "train mode computes something else") or spec


def _exact(subject: Subject) -> Instance:
    """The instance in the widest dtype that runs, float64 or float32."""
    for dtype in EXACT:
        instance = subject.instance(dtype, SEED)
        try:
            instance.call(torch.ones(subject.shape, dtype=dtype, device=subject.device))
        except (NotComparableError, UnreadableAnatomyError):
            raise
        except Exception as error:  # an operation of another library may raise anything
            failure = error
            continue
        return instance
    raise UnreadableAnatomyError(f"it runs neither in float64 nor in float32: {failure}") from failure


@contextmanager
def _no_trace(devices: Iterable[torch.device]) -> Iterator[None]:
    """No gradients, no autocast, no warnings from the copies; random states as they were."""
    cuda = [device for device in set(devices) if device.type == "cuda"]
    state = random.getstate()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # which shows other operations for the same module
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
