from __future__ import annotations

import pytest

from tests import servers
from tests.clients.node.nodes import Brokered


@pytest.fixture(params=["embedded", "mosquitto", "rabbitmq"])
def at(request: pytest.FixtureRequest) -> Brokered:
    """Nodes at every broker."""
    return Brokered(request.getfixturevalue(f"{request.param}_server"))


@pytest.fixture
def at_mosquitto(mosquitto_server: servers.Mosquitto) -> Brokered:
    """Nodes, where the broker makes no difference."""
    return Brokered(mosquitto_server)
