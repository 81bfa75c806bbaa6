"""Checkpoint folders: their weights read lazily and written tensor by tensor, whole or not at all."""
