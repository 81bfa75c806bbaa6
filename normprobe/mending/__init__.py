"""Plan, rewrite and mend: the public face of the rewrites."""

from normprobe.mending.planned import plan, rewrite
from normprobe.mending.run import Left, Mended, Mending, mend

__all__ = ["Left", "Mended", "Mending", "mend", "plan", "rewrite"]
