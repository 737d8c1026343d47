"""The pure kernel: no clock, no randomness, no I/O. Time is always an argument."""
