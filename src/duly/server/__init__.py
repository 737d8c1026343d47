"""The hub: assembles all parts, and starts and stops them in order."""
