"""Two models side by side: what differs in their build, and where their signals part."""
