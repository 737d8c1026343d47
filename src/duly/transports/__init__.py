"""Ways in and out of a process. They do not know each other."""
