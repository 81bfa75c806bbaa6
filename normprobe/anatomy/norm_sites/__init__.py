"""Where norms run: modules, patterns of operations, reparametrised weights."""
