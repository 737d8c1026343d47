"""The footprint of a flush: the rows that are locked before it."""

from __future__ import annotations

from typing import cast

import pytest

from duly.core import operations as w
from duly.errors import ProgramError
from duly.storage.footprint import Footprint


class ForgottenOperation(w.Operation[bool], frozen=True):
    """An operation whose author did not say which rows it touches."""


def test_an_operation_without_a_footprint_is_an_error_and_not_a_flush_without_locks() -> None:
    with pytest.raises(ProgramError, match="ForgottenOperation"):
        Footprint([(cast("w.Write", ForgottenOperation()),)])
