"""Which norms compute with an eps that the model's own class gives them, whatever the configuration states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from normprobe.measures.own_init import own_structure
from normprobe.records import Anatomy, Declared, NormSite, Skipped
from normprobe.records.declared import EPS_AGREES
from normprobe.records.norms import ON_STREAMS

_HELD = frozenset(vars(nn.Module()))  # what every module holds


def with_own(
    declared: Sequence[Declared], model: nn.Module, anatomy: Anatomy
) -> tuple[tuple[Declared, ...], tuple[Skipped, ...]]:
    """The statements; those of an eps that no norm on a stream has name the norms that a fresh instance of the model's
    class builds with the same settings, and why they could not be asked. No values are drawn for it.

    Args:
        declared: the statements of the configurations in `model`.
        model: the model; only the classes of transformers say what they are built with.
        anatomy: its norms.
    """
    norms = [norm for norm in anatomy.norms if norm.module and norm.executed and norm.role in ON_STREAMS]
    odd = [one for one in declared if one.fact == "eps" and norms and not any(_agrees(one, norm) for norm in norms)]
    fresh, why = own_structure(model) if odd else (None, "")
    if fresh is None:
        what = f"eps of the norms that the class {type(model).__name__} builds"
        return tuple(declared), (Skipped(what=what, why=why),) if why else ()
    own = tuple(_same(model, fresh, [norm.path for norm in norms]))
    return tuple(one.model_copy(update={"own": own}) if one in odd else one for one in declared), ()


def _agrees(declared: Declared, norm: NormSite) -> bool:
    return norm.eps is not None and abs(norm.eps / declared.value - 1) <= EPS_AGREES


def _same(model: nn.Module, fresh: nn.Module, paths: Sequence[str]) -> Iterator[str]:
    """The paths of modules that both hold, of one class and with the same settings."""
    built = dict(fresh.named_modules())
    for path in paths:
        name = "" if path == "." else path
        if name in built and _alike(model.get_submodule(name), built[name]):
            yield path


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules are of one class, agree in the settings that both hold, and have nothing laid over them;
    marks that one alone holds are no settings."""
    children, others = dict(one.named_children()), dict(other.named_children())
    mine, theirs = _settings(one), _settings(other)
    laid = any(callable(value) for name, value in mine.items() if name not in theirs)
    if type(one) is not type(other) or laid or one._forward_hooks or one._forward_pre_hooks:
        return False
    if children.keys() != others.keys() or not all(_equal(mine[k], theirs[k]) for k in mine.keys() & theirs.keys()):
        return False
    return all(_alike(child, others[name]) for name, child in children.items())


def _equal(one: Any, other: Any) -> bool:
    """Whether two settings are the same; those that do not say so (arrays, tensors without values) are not."""
    try:
        return bool(one == other)
    except Exception:  # whatever a foreign comparison raises
        return False


def _settings(module: nn.Module) -> dict[str, Any]:
    """What a module holds beside tensors and children."""
    return {name: value for name, value in vars(module).items() if name not in _HELD and not isinstance(value, Tensor)}
