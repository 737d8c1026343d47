"""Wire forms of the same kernel: bytes ↔ core messages, nothing else."""
