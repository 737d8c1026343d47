"""How fast, against what, and how it grows: `python -m bench [--quick]`."""
