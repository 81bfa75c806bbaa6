"""A name becomes a model and its inputs."""

from normprobe.targets.optimizer import load_optimizer
from normprobe.targets.options import Loaded, TargetOptions
from normprobe.targets.place import to_device_dtype
from normprobe.targets.resolve import resolve

__all__ = ["Loaded", "TargetOptions", "load_optimizer", "resolve", "to_device_dtype"]
