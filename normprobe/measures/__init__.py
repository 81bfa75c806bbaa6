"""What the signal does, in numbers: one file per question."""
