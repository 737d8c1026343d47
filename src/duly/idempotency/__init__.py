"""Running something once per key: what `once`, `once_block` and the HTTP middleware have in common."""
