"""Ways in and out of a process. They do not import each other."""
