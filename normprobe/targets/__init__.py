"""A name becomes a model and its inputs."""

from normprobe.targets.options import Loaded, TargetOptions
from normprobe.targets.place import to_device_dtype
from normprobe.targets.resolve import resolve

__all__ = ["Loaded", "TargetOptions", "resolve", "to_device_dtype"]
