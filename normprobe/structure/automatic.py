"""The automatic classes of transformers, by name."""

from __future__ import annotations


def automatic(prefix: str = "AutoModel") -> list[str]:
    """Their names that begin with `prefix`, in order; `dir(transformers)` would take half a second."""
    import transformers

    return sorted(name for name in vars(transformers)["__all__"] if name.startswith(prefix))
