"""Start added gains from the lengths that queries and keys had, and train them to give the outputs that they gave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs, invoke
from normprobe.capture.outputs import named_tensors
from normprobe.errors import RewriteError
from normprobe.measures.main_output import main_output
from normprobe.measures.padding import padding_masks
from normprobe.rewrites.base import module_at
from normprobe.rewrites.qk.modules import NormedHeads

Rows = tuple[tuple[int, ...], ...]
_RATE = 0.03  # choice: of Adam, relative to gains of about 1; falls to 0 along a cosine
_BETAS, _TINY = (0.9, 0.99), 1e-8


@contextmanager
def aside(projections: Sequence[nn.Module]) -> Iterator[None]:
    """Let the model run as it was before the norms were added."""
    try:
        for module in projections:
            module.__dict__[NormedHeads.ASIDE] = True
        yield
    finally:
        for module in projections:
            module.__dict__.pop(NormedHeads.ASIDE, None)


def head_rms(model: nn.Module, rows: Mapping[Any, Rows], inputs: Inputs) -> dict[Any, Tensor]:
    """Median RMS over all tokens of each row of features that a norm will see, without the norms: (rows,) each.

    Args:
        model: with the norms added.
        rows: by (path of the projection, part).
        inputs: of one forward; padding is left out.
    """
    found: dict[Any, Tensor] = {}
    padding = next(iter(padding_masks(inputs)), None)

    def look(key: Any, output: Tensor) -> None:
        heads = output.detach()[..., torch.tensor(rows[key], device=output.device)]
        rms = heads.to(torch.promote_types(output.dtype, torch.float32)).square().mean(-1).sqrt()
        kept = rms[~padding] if padding is not None and padding.shape == rms.shape[:-1] else rms
        found[key] = kept.flatten(0, -2).median(0).values

    modules = {path: module_at(model, path) for path, _ in rows}
    with ExitStack() as hooks, aside(list(modules.values())), untouched(model) as keeper, torch.no_grad():
        for key in rows:
            handle = modules[key[0]].register_forward_hook(lambda m, a, out, key=key: look(key, out))
            hooks.callback(handle.remove)
        with keeper.mode():
            invoke(model, inputs)
    return found


def distil(
    model: nn.Module, projections: Sequence[nn.Module], gains: Sequence[nn.Parameter], inputs: Inputs, steps: int
) -> None:
    """Train the gains, and nothing else, so that the model gives the logits that it gave without the norms.

    Where no output has that name, those of its first floating tensor with an axis.

    Adam (Kingma & Ba 2015) with float32 copies of the gains; the loss is KL(before ‖ after) over the last axis.

    Raises:
        RewriteError: the model was made in inference mode, it returns numbers without axes alone, the loss is not
            finite, or no gradient reaches the gains.
    """
    _refuse_inference(model)
    with aside(projections), torch.no_grad():
        wanted = _outputs(model, inputs).float().log_softmax(-1)
    held = [gain.detach().float().clone() for gain in gains]
    first, second = [torch.zeros_like(h) for h in held], [torch.zeros_like(h) for h in held]
    for step in range(steps):
        gradients = _gradients(model, gains, inputs, wanted)
        rate = _RATE * (1 + math.cos(math.pi * step / steps)) / 2
        for gain, master, m, v, g in zip(gains, held, first, second, gradients, strict=True):
            m.lerp_(g, 1 - _BETAS[0])
            v.lerp_(g.square(), 1 - _BETAS[1])
            along = m / (1 - _BETAS[0] ** (step + 1))
            size = (v / (1 - _BETAS[1] ** (step + 1))).sqrt() + _TINY
            master.mul_(1 - rate * (along / size))  # relative steps: gains differ by orders of magnitude
            gain.data.copy_(master)


def _refuse_inference(model: nn.Module) -> None:
    """Raise a RewriteError where torch takes no gradients through a model."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise RewriteError(
                "the gains cannot be distilled",
                expected="a model that gradients can pass",
                found=f"{name}, which was made in torch.inference_mode()",
                hint='make or load the model outside of it, or start="calibrated"',
            )


def _gradients(model: nn.Module, gains: Sequence[nn.Parameter], inputs: Inputs, wanted: Tensor) -> list[Tensor]:
    with torch.enable_grad():
        after = _outputs(model, inputs).float().log_softmax(-1)
        loss = (wanted.exp() * (wanted - after)).sum(-1).mean()
        if not bool(loss.isfinite()):
            raise RewriteError("the gains cannot be distilled", expected="a finite KL", found=f"{float(loss.detach())}")
        return [g.float() for g in torch.autograd.grad(loss, list(gains))]


def _outputs(model: nn.Module, inputs: Inputs) -> Tensor:
    with untouched(model) as keeper, keeper.mode():
        output = invoke(model, inputs)
    found = main_output(output)
    if found is None:
        told = ", ".join(f"{name} of shape {tuple(t.shape)}" for name, t in named_tensors(output)) or "no tensor"
        raise RewriteError("the gains cannot be distilled", expected="an output of logits or features", found=told)
    return found
