"""The applications on the kernel. They do not know each other."""
