"""What runs the pure core: the engine, clocks, supervised tasks, files."""
