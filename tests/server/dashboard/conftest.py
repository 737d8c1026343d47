"""A browser for the tests of the page."""

from tests.browsers import browser

__all__ = ["browser"]
