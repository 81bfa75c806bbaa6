"""The class of a patched model: one of this package, and the text of a file that has it without this package."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from normprobe.errors import CheckpointError, TargetError
from normprobe.structure.automatic import automatic
from normprobe.structure.bundle import bundle
from normprobe.structure.field import FIELD
from normprobe.structure.kinds import KINDS, OWN, TORCH
from normprobe.structure.restore import Restored, part_of
from normprobe.version import __version__

MODULE = "modeling_normprobe"
PREFIX = "Patched"


@cache
def patched(base: type[Any], over: type[Any] | None = None) -> type[Any]:
    """`base`, a model class of transformers, built with the changes of its configuration; it saves all that is needed
    to load it again.

    Args:
        base: what a file with the class is written for.
        over: a class of one's own over `base`, which is changed in its place.
    """

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        out = super(made, self).save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            write_modelling(Path(save_directory), base, self.config.normprobe["changes"])
        return out

    def _upload_modified_files(self: Any, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        write_modelling(Path(working_dir), base, self.config.normprobe["changes"])  # before `save_pretrained` returns
        return super(made, self)._upload_modified_files(working_dir, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        found = super(made, self).__reduce_ex__(protocol)
        plain = not isinstance(found, str) and found[:2] == (copyreg.__newobj__, (made,))  # type: ignore[attr-defined]
        return (_blank, (base, over), *found[2:]) if plain else found

    methods: dict[str, Any] = {"save_pretrained": save_pretrained, "_upload_modified_files": _upload_modified_files}
    if over is not None:
        methods["__reduce_ex__"] = __reduce_ex__  # its name leads pickles to the class over `base` itself
    changed = over or base
    body = {"normprobe_kinds": KINDS, "__module__": __name__, **methods}
    made: type[Any] = type(PREFIX + changed.__name__, (Restored, changed), body)
    return made


def record_of(model: Any, changes: Sequence[Mapping[str, Any]], fields: Iterable[tuple[str, ...]]) -> dict[str, Any]:
    """What a configuration lists of a model: its changes behind those of an earlier patch, and so the fields of it that
    they changed."""
    earlier = getattr(model.config, FIELD, None) or {"changes": (), "fields": ()}
    number = max((change.get("patch", 0) + 1 for change in earlier["changes"]), default=0)
    every = [*earlier["changes"], *({**change, "patch": number} if number else change for change in changes)]
    named = dict.fromkeys((*map(tuple, earlier.get("fields", ())), *fields))
    rest = {"part": part_of(model), "changes": every, "fields": [*map(list, named)]}
    return {"version": __version__, "base": base_of(model).__name__, **rest}


def state_record(config: Any, base: type[Any], record: Mapping[str, Any]) -> None:
    """Let a configuration list the changes of `base`, and name the classes that have them."""
    setattr(config, FIELD, dict(record))
    config.auto_map = auto_map(base)
    config.architectures = [PREFIX + base.__name__]


def _blank(base: Any, over: Any) -> Any:
    return object.__new__(patched(base, over))


def recorded_base(config: Any) -> Any:
    """The class of transformers that was patched, by a configuration that lists changes.

    Raises:
        CheckpointError: what it lists is none of that.
        TargetError: this transformers has none of its name.
    """
    import transformers

    record = getattr(config, FIELD)
    if not isinstance(record, Mapping) or not {"base", "part", "changes"} <= record.keys():
        expected = 'an object with "base", "part" and "changes"'
        found = ", ".join(record) or "an empty one" if isinstance(record, Mapping) else repr(record)
        what = f'"{FIELD}" of config.json is damaged'
        raise CheckpointError(what, expected=expected, found=found, hint="take config.json from where it was written")
    name = str(record["base"])
    base = getattr(transformers, name, None)
    if base is None:
        what = f"transformers {transformers.__version__} has no class {name}, which the checkpoint is built on"
        raise TargetError(what, hint="pip install --upgrade transformers")
    return base


def base_of(model: nn.Module) -> type[Any]:
    """The class of transformers that `model` is built by.

    Raises:
        CheckpointError: it is none of transformers' own, so that no other program has it.
    """
    found = transformers_class(model)
    if found is not None:
        return found
    raise CheckpointError(
        f"{type(model).__name__} is no model class of transformers",
        expected="a class that transformers has, since what is added has to be built on it",
        hint="normprobe.rewrite changes it in place; or patch what needs no code",
    )


def transformers_class(model: nn.Module) -> type[Any] | None:
    """The class of transformers that `model` is of; None where it is of none."""
    import transformers

    for kind in type(model).__mro__:
        name = kind.__name__.partition("[")[0]
        found: type[Any] | None = getattr(transformers, name, None)
        if found is kind and kind.__module__.startswith("transformers.models."):
            return found
    return None


def __getattr__(name: str) -> Any:
    """Patched classes by their names, which pickles hold."""
    import transformers

    base = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if base is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return patched(base)


def auto_map(base: type[Any]) -> dict[str, str]:
    """What `config.auto_map` says: each automatic class of transformers builds the patched form of what it would build.

    Raises:
        CheckpointError: none would build `base`.
    """
    return {name: f"{MODULE}.{PREFIX}{kind.__name__}" for name, kind in _automatic(base).items()}


def _automatic(base: type[Any]) -> dict[str, type[Any]]:
    """What each automatic class of transformers builds from a configuration of `base`: itself, or with another head."""
    import transformers

    found: dict[str, type[Any]] = {}
    for name in automatic():
        mapping = getattr(getattr(transformers, name), "_model_mapping", {})
        chosen = mapping.get(base.config_class, None) or ()
        kinds = [k for k in (chosen if isinstance(chosen, tuple | list) else (chosen,)) if _fits(k, base)]
        if kinds:
            found[name] = base if base in kinds else kinds[0]
    if base not in found.values():
        raise CheckpointError(f"{base.__name__} belongs to no automatic class", expected="AutoModelForCausalLM, say")
    return found


def _fits(kind: type[Any], base: type[Any]) -> bool:
    """Whether transformers has `kind` by its name, made for the same configuration as `base`."""
    import transformers

    return kind.config_class is base.config_class and getattr(transformers, kind.__name__, None) is kind


def write_modelling(folder: Path, base: type[Any], changes: Sequence[Mapping[str, Any]]) -> None:
    """Write the file into a folder that is not yet anybody's."""
    (folder / f"{MODULE}.py").write_text(text_of(base, changes), encoding="utf-8")


def text_of(base: type[Any], changes: Sequence[Mapping[str, Any]]) -> str:
    """The text of a file with the patched class, the same for other heads, and the classes that `changes` name."""
    kinds = [kind for kind in OWN if kind.__name__ in _named(changes)]
    torch = [kind for kind in TORCH if kind.__name__ in _named(changes)]
    rows = [f'    "{kind.__name__}": {kind.__name__},' for kind in kinds]
    rows += [f'    "{kind.__name__}": nn.{kind.__name__},' for kind in torch]
    heads = sorted({*_automatic(base).values(), base}, key=lambda kind: (kind is not base, kind.__name__))
    return "\n".join(
        (
            f'"""{base.__name__} with the changes that config.json lists under "{FIELD}".',
            "",
            f"Written by normprobe {__version__}; it needs torch and transformers alone. Load it with",
            "`from_pretrained(folder, trust_remote_code=True)`; `normprobe.load(folder)` does without running it.",
            '"""',
            "",
            bundle([*kinds, Restored], modules=["transformers"]),
            "",
            "KINDS = {",
            *rows,
            "}",
            *(line for kind in heads for line in _class_text(kind)),
            "",
        )
    )


def _class_text(base: type[Any]) -> tuple[str, ...]:
    return (
        "",
        "",
        f"class {PREFIX}{base.__name__}(Restored, transformers.{base.__name__}):",
        f'    """{base.__name__}, built with the changes of its configuration."""',
        "",
        "    normprobe_kinds = KINDS",
    )


def _named(value: Any) -> set[str]:
    """Every text among plain values."""
    if isinstance(value, str):
        return {value}
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return {name for part in parts for name in _named(part)}
