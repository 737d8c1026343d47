"""The sentinel's machine: signals, device state, suppression."""
