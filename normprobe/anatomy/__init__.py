"""From the recorded data flow to the Anatomy: norm sites, residual streams, branches, attention."""
