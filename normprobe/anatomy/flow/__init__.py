"""The recorded operations as a graph of steps, and ways through it."""
