"""Six classic results, reproduced by normprobe's own measures on small models: a check of the installation."""
