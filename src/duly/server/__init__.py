"""The hub: all parts put together, started and stopped in order."""
