"""How a model scales with its width or depth, and the parameter groups of muP."""
