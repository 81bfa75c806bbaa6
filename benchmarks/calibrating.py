"""One healthy model: built, probed, and how far it is from each limit of each check.

As a program it reads one entry a line (JSON) from standard input and answers each as `trial` does. The report of each
model is kept in the folder that it is given, and judged again from there as long as the code that measures is the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.healthy import Built, Healthy, built
from benchmarks.margins import turns
from benchmarks.trial import NotBuiltError, answers, where
from normprobe.checks import judged
from normprobe.records import ReportData


def attempt(entry: Healthy, kept: Path | None = None, tell: Any = print) -> dict[str, Any]:
    """Build, probe and judge one model."""
    tell("build")
    file = None if kept is None else kept / f"{entry.name.replace('/', '_')}.json"
    if file is not None and file.is_file():
        return _answer(entry, ReportData.model_validate_json(file.read_text(encoding="utf-8")))
    try:
        model = built(entry)
    except NotBuiltError as error:
        return {"name": entry.name, "outcome": "not built", "note": str(error)}
    except Exception as error:  # whatever a library raises whose version lacks a part of it
        return {"name": entry.name, "outcome": "not built", "note": f"{type(error).__name__}: {error}".splitlines()[0]}
    tell("probe")
    try:
        data = _probed(model)
    except Exception as error:
        return {"name": entry.name, "outcome": "crashed", "note": where(error)}
    if file is not None:
        file.write_text(data.model_dump_json(by_alias=True), encoding="utf-8")
    tell("judge")
    return _answer(entry, data)


def _probed(model: Built) -> ReportData:
    """The report with gradients, where the model has them, and with the optimiser that most recipes use."""
    from normprobe import probe
    from normprobe.errors import NormprobeError

    given = {"tokenizer": model.tokenizer, "optimizer": _optimizer(model.model)}
    try:
        return probe(model.model, model.inputs, level="backward", **given).data
    except NormprobeError:
        return probe(model.model, model.inputs, **given).data


def _optimizer(model: Any) -> Any:
    """AdamW that decays what has two axes or more: neither gains nor offsets."""
    import torch

    learned = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learned if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in learned if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3) if learned else None


def _answer(entry: Healthy, data: ReportData) -> dict[str, Any]:
    """What the checks say of a report now."""
    data = judged(data, data.settings)
    init = data.measurements.init
    return {
        "name": entry.name,
        "outcome": "probed",
        "note": "",
        "level": data.level,
        "trained": None if init is None else init.trained,
        "findings": [
            one.model_dump(mode="json", include={"code", "name", "severity", "where", "message", "value", "limit"})
            for one in data.findings
        ],
        "turns": [turn._asdict() for turn in turns(data)],
    }


def main() -> None:
    """Answer entries until standard input ends."""
    import torch

    out = answers()
    torch.set_num_threads(1)
    kept = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    for line in sys.stdin:
        entry = Healthy(**json.loads(line))
        answer = attempt(entry, kept, lambda stage: print(json.dumps({"stage": stage}), file=out))
        print(json.dumps(answer), file=out)


if __name__ == "__main__":
    main()
