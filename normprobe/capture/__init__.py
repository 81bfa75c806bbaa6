"""Modes, wrappers and the recorder: attach and restore everything, always."""
