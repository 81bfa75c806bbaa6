"""`file.py:factory` and `package.module:factory`: the user's own code builds the model."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.checkpoints.names import listed
from normprobe.errors import CheckpointError, TargetError
from normprobe.targets.options import Built, TargetOptions
from normprobe.targets.quiet import quiet, seeded

EXPECTED = "a torch.nn.Module, or (module, inputs) with inputs a tensor, tuple or dict"


def load_factory(where: str, attribute: str, options: TargetOptions, name: str) -> Built:
    """Call the factory `attribute` of the file or module `where`, under `options.seed`.

    With `options.meta` it runs under the meta device.

    Raises:
        TargetError: the code cannot be imported, has no such factory, raises, or returns something else.
    """
    options.refuse("a factory builds the model", "revision", "config_only", "allow_pickle", "trust_remote_code")
    with seeded(options.seed), imported(where, attribute, name) as found:
        if isinstance(found, nn.Module):
            result: Any = found
        else:
            _check_callable(found, attribute, name)
            device = torch.device("meta") if options.meta else contextlib.nullcontext()
            with named_error(f"{name}: the factory raised"), device:
                result = found()
    model, inputs = _unpack(result, name)
    return Built(model, "factory", inputs=inputs, notes=(f"factory called under seed {options.seed}",))


def sized_factory(name: str) -> Callable[[int], Any] | None:
    """The factory that `file.py:factory` or `package.module:factory` names, which takes a size; None for other names.

    It is called with the size and returns a module, or (module, inputs).

    Raises:
        TargetError: the code cannot be imported, has no such factory, or it does not take one argument.
    """
    where, _, attribute = name.rpartition(":")
    is_file = where.endswith(".py")
    if not is_file and not (where and all(part.isidentifier() for part in (*where.split("."), *attribute.split(".")))):
        return None
    try:
        with imported(where, attribute, name) as found:
            inspect.signature(found).bind(1)
    except (TypeError, ValueError) as error:
        expected = "a function of one size: def factory(width): return model, inputs"
        raise TargetError(f"{name}: not a factory of sizes", expected=expected, found=str(error)) from error

    def built(size: int) -> Any:
        with named_error(f"{name}: the factory raised for {size}"):
            model, inputs = _unpack(found(size), name)
        return model if inputs is None else (model, inputs)

    return built


@contextlib.contextmanager
def imported(where: str, attribute: str, name: str) -> Iterator[Any]:
    """What `attribute` names in a file or module; inside, modules beside it can be imported, and nothing is printed.

    Raises:
        TargetError: the code cannot be imported, or has nothing of that name.
    """
    is_file = where.endswith(".py")
    with _importing_from(Path(where).resolve().parent if is_file else Path.cwd()), quiet():
        with named_error(f"{name}: importing {where} failed"):
            module = _import_file(Path(where)) if is_file else _import_module(where, name)
        yield _lookup(module, attribute, where, name)


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def named_error(message: str) -> Iterator[None]:
    """Turn the user's own error into a TargetError that shows its type, its text and its line."""
    try:
        yield
    except (TargetError, CheckpointError):
        raise
    except (Exception, SystemExit) as error:
        raise TargetError(message, found=_own_words(error)) from error


def _own_words(error: BaseException) -> str:
    place = ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" at {error.filename}:{error.lineno}"
    elif frames := traceback.extract_tb(error.__traceback__):
        place = f" at {frames[-1].filename}:{frames[-1].lineno}"
    return f"{type(error).__name__}: {error}{place}"


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"no such file: {path}", expected="a Python file with a factory", found=os.getcwd())
    module_name = f"normprobe_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _import_module(where: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(error.name + ".")):
            raise
        raise TargetError(
            f"{name}: no module named {error.name}",
            expected=f"{where}, importable from {os.getcwd()} or installed",
            hint="path/to/file.py:factory names a file instead",
        ) from error


def _lookup(module: ModuleType, attribute: str, where: str, name: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            own = tuple(key for key, value in vars(module).items() if _is_own_callable(value, module))
            close = difflib.get_close_matches(attribute, own, n=3, cutoff=0.5)
            raise TargetError(
                f"{name}: {where} has no {attribute}" if attribute else f"{name}: which function of {where}?",
                expected=f"the name of a function of {where}",
                found=listed(own) or "no functions",
                hint=f"did you mean {' or '.join(close)}?" if close else None,
            )
        found = getattr(found, part)
    return found


def _is_own_callable(value: Any, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _check_callable(found: Any, attribute: str, name: str) -> None:
    if not callable(found):
        raise TargetError(f"{name}: {attribute} is not a function", expected=EXPECTED, found=type(found).__name__)
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return  # a callable that does not show its signature: calling it will tell
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in free]
    if needed:
        raise TargetError(
            f"{name}: the factory takes arguments",
            expected="a function that can be called without any",
            found=f"{attribute}({', '.join(needed)})",
            hint="wrap it: def factory(): return " + f"{attribute}(…)",
        )


def _unpack(result: Any, name: str) -> tuple[nn.Module, tuple[Any, ...] | dict[str, Any] | None]:
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        found = f"{type(result).__name__}: {result!r:.80}"
        raise TargetError(f"{name}: the factory returned no model", expected=EXPECTED, found=found)
    if isinstance(inputs, Tensor):
        return model, (inputs,)
    if isinstance(inputs, list):
        return model, tuple(inputs)
    if inputs is None or isinstance(inputs, tuple | dict):
        return model, inputs
    raise TargetError(f"{name}: the factory's inputs cannot be used", expected=EXPECTED, found=type(inputs).__name__)
