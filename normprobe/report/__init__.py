"""The report and what a person sees of it: terminal, HTML, markdown, JSON. Measures nothing."""
