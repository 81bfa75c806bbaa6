"""A model on the Hugging Face hub: fetched file by file into the cache, then loaded as a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from normprobe.checkpoints.carried import WEIGHTS
from normprobe.checkpoints.weights import PICKLE, SAFE, SAFE_INDEX, read_json, shard_names
from normprobe.errors import NormprobeError, TargetError
from normprobe.targets.config import check_fields, close_types, is_model_type
from normprobe.targets.folder import load_folder
from normprobe.targets.options import Built, TargetOptions
from normprobe.targets.quiet import quiet
from normprobe.targets.tokenizers import FILES

_FORMS = (
    "no model type of transformers has a name like it; a target may be a model type (gpt2, llama, …), a hub id "
    "(org/name), a checkpoint folder, a config.json, a .gguf file, or a factory (path/file.py:function)"
)
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


@dataclass(frozen=True)
class Repository:
    """One repository at one revision; `offline` says why the hub could not be reached, None where it was."""

    name: str
    revision: str | None
    offline: str | None

    def fetch(self, file: str) -> Path | None:
        """The cached path of `file`, fetched if need be; None where the repository has no such file."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            with quiet():
                path = hf_hub_download(
                    self.name, file, revision=self.revision, local_files_only=self.offline is not None
                )
        except LocalEntryNotFoundError:
            if self.offline is None:
                raise
            return None
        except EntryNotFoundError:
            return None
        return Path(path)


def load_hub(name: str, options: TargetOptions) -> Built:
    """The model `name` of the hub, at `options.revision`.

    Raises:
        TargetError: no such repository or revision, no access, or the hub cannot be reached and the cache
            does not hold it; and all that a checkpoint folder raises.
    """
    repository = _find(name, options)
    try:
        folder = _fetch_all(repository, options)
    except NormprobeError:
        raise
    except Exception as error:
        raise TargetError(
            f"{name}: downloading from the hub failed", found=f"{type(error).__name__}: {error}"
        ) from error
    built = load_folder(folder, options, name, "hub")
    notes = built.notes
    if repository.offline is not None:
        notes = (*notes, f"hub not reached ({repository.offline}): files from the local cache")
    return replace(built, revision=folder.name, notes=notes)


def whole_repository(name: str, options: TargetOptions) -> Path:
    """Fetch a repository with every file but weights in other formats, and return the folder that holds it.

    Raises:
        TargetError: there is no such repository, it cannot be reached, or it has no weights.
    """
    from huggingface_hub import snapshot_download

    repository = _find(name, options)
    try:
        folder = _fetch_all(repository, options)
        if repository.offline is None:
            with quiet():
                snapshot_download(name, revision=folder.name, ignore_patterns=[f"*{suffix}" for suffix in WEIGHTS])
        return folder
    except NormprobeError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise TargetError(f"{name}: downloading from the hub failed", found=found) from error


def _find(name: str, options: TargetOptions) -> Repository:
    """Ask the hub once, without the retries that make an unreachable hub cost half a minute."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    revision = options.revision
    wanted = f"{name} at revision {revision}" if revision else name
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
    except errors.EntryNotFoundError as error:
        raise TargetError(
            f"{wanted}: the hub repository has no config.json",
            hint="download what it holds and name that file, or a factory (file.py:function)",
        ) from error
    except errors.GatedRepoError as error:
        raise TargetError(
            f"{wanted}: the hub asks for its licence to be accepted first",
            hint=options.hint("hf auth login", _hint(name, options)),
        ) from error
    except errors.RevisionNotFoundError as error:
        raise TargetError(f"{name}: the hub has no revision {revision!r} of it", hint="--revision main") from error
    except errors.RepositoryNotFoundError as error:
        raise TargetError(
            f"{name}: not found",
            expected=_expected(options),
            found=f"no file or folder of that name, and no such (public) repository on {_endpoint()}",
            hint=options.hint("hf auth login for a private one", _hint(name, options)),
        ) from error
    except Exception as error:
        return Repository(name, revision, _why_offline(error))
    return Repository(name, revision, None)


def _why_offline(error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return "offline mode is on, HF_HUB_OFFLINE=1"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _fetch_all(repository: Repository, options: TargetOptions) -> Path:
    """Fetch what loading needs, and return the folder of the cache that holds it."""
    config = repository.fetch("config.json")
    if config is None:
        raise _unreachable(repository, options)
    check_fields(config, read_json(config), options)
    for file in FILES:
        repository.fetch(file)
    if options.trust_remote_code and repository.offline is None:
        _fetch_code(repository)
    if not (options.meta or options.config_only):
        _fetch_weights(repository, options)
    return config.parent


def _fetch_weights(repository: Repository, options: TargetOptions) -> None:
    if repository.fetch(SAFE) is not None:
        return
    index = repository.fetch(SAFE_INDEX)
    if index is not None:
        for shard in shard_names(index):
            repository.fetch(shard)
        return
    if options.allow_pickle and repository.fetch(PICKLE) is not None:
        return
    where = "the local cache" if repository.offline else "the hub repository"
    pickles = "" if options.allow_pickle else f"--allow-pickle reads a {PICKLE} where there is one"
    raise TargetError(
        f"{repository.name}: no weights in {where}",
        expected=f"{SAFE} or {SAFE_INDEX}",
        hint=options.hint("--config-only for random weights", pickles),
    )


def _fetch_code(repository: Repository) -> None:
    from huggingface_hub import snapshot_download

    with quiet():
        snapshot_download(repository.name, revision=repository.revision, allow_patterns=["*.py"])


def _unreachable(repository: Repository, options: TargetOptions) -> TargetError:
    return TargetError(
        f"{repository.name}: not found",
        expected=_expected(options),
        found=(
            f"no file or folder of that name; not in the hub's local cache; "
            f"{_endpoint()} not reached ({repository.offline})"
        ),
        hint=options.hint(_hint(repository.name, options)),
    )


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _expected(options: TargetOptions) -> str:
    kinds = "a local path, a model type of transformers" if options.config_only else "a local path"
    return f"{kinds} or a repository of the hub"


def _hint(name: str, options: TargetOptions) -> str:
    """`--config-only` with the model type that `name` is or contains; close types where it was given already."""
    from transformers import CONFIG_MAPPING

    if options.config_only:
        close = " or ".join(f"--config-only {kind}" for kind in close_types(name))
        return f"{close}, if one of these was meant" if close else _FORMS
    if is_model_type(name):
        return f"--config-only {name} builds its default configuration with random weights"
    words = re.split(r"[^a-z0-9]+", name.rsplit("/", 1)[-1].lower())
    contained = max((kind for kind in CONFIG_MAPPING if kind in words), key=len, default=None)
    if contained is not None:
        return f"--config-only {contained} builds a default {contained} with random weights"
    return "--config-only MODEL_TYPE (gpt2, llama, …) builds a default configuration with random weights"
