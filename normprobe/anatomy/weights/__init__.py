"""The weights of products, convolutions and lookups: their roles, fans, and what follows them."""
