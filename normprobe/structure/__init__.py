"""What a rewrite changed besides values, as plain values: written down, put into another model, or into a file that
loads without this package."""
