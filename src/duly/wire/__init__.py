"""The wire formats of the kernel: translates between bytes and core messages."""
