"""The sentinel's state machine: signals, device state, suppression."""
