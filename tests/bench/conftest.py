"""The bench reads processor times and deaths from Linux; elsewhere only its documents are tested."""

from __future__ import annotations

import sys

collect_ignore = [] if sys.platform == "linux" else ["test_lean_relay.py", "test_load.py", "test_run.py"]
