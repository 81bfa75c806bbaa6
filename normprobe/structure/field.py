"""The field of a configuration that lists the changes of a patched model."""

from __future__ import annotations

FIELD = "normprobe"
"""Holds {"base": name of the class that is changed, "part": path in it of the model below the head, "changes": […],
"fields": names of the other fields that the patch changed, each behind those of what it lies in, "version": of
normprobe}."""
