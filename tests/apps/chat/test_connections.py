"""Which people are connected, and in which conversations each of their connections is."""

from __future__ import annotations

from duly.apps.chat import conversations as c
from duly.apps.chat.connections import Connections
from duly.identity.accounts import Principal, Role
from duly.wire.outgoing import OutgoingFrame, PresenceFrame
from duly.wire.session import UncongestedSession

BOB = Principal("bob", Role.USER)
CONV = "ann+bob"


class ConnectionSocket(UncongestedSession):
    """A connection that remembers what was pushed to it."""

    def __init__(self) -> None:
        self.pushed: list[OutgoingFrame] = []

    def push(self, frame: OutgoingFrame) -> None:
        self.pushed.append(frame)

    def close(self, reason: str) -> None:
        raise AssertionError(reason)


def test_a_person_has_several_connections_each_with_its_own_subscriptions() -> None:
    connections, phone, desk = Connections(), ConnectionSocket(), ConnectionSocket()
    one, other = connections.add(phone, BOB), connections.add(desk, BOB)
    connections.subscribe(one, CONV, told=3, head=5)
    assert connections.of_person("bob") == [one, other]
    assert connections.in_conversation(CONV) == [one]
    assert connections.of_session(desk) is other
    assert connections.of_session(ConnectionSocket()) is None


def test_the_head_is_what_every_subscription_knows_of() -> None:
    connections = Connections()
    one, other = connections.add(ConnectionSocket(), BOB), connections.add(ConnectionSocket(), BOB)
    assert connections.head(CONV) is None
    connections.subscribe(one, CONV, told=3, head=5)
    connections.subscribe(other, CONV, told=3, head=4)
    assert connections.head(CONV) == 4


def test_attempts_count_for_lines_that_were_sent_and_not_acknowledged() -> None:
    connections = Connections()
    bob = connections.add(ConnectionSocket(), BOB)
    connections.subscribe(bob, CONV, told=3, head=5)
    subscription = bob.subscriptions[CONV]
    subscription.acked, subscription.attempt = 1, 4
    assert [connections.attempts(CONV, n, {"bob"}) for n in (1, 2, 3, 4)] == [0, 4, 4, 0]
    assert connections.attempts(CONV, 2, {"ann"}) == 0, "bob's own connections do not count"


def test_a_connection_that_has_ended_is_subscribed_to_nothing_new() -> None:
    connections, socket = Connections(), ConnectionSocket()
    bob = connections.add(socket, BOB)
    connections.subscribe(bob, CONV, told=0, head=0)
    assert connections.remove(socket) is bob
    over = connections.unsubscribe(bob, CONV)
    assert over is not None
    assert over.over
    connections.subscribe(bob, "bob+eve", told=0, head=0)
    assert connections.conversations() == []
    assert connections.people() == []
    assert connections.remove(socket) is None


def test_a_conversation_concerns_the_hub_of_either_of_its_two_people_before_they_are_in_it() -> None:
    connections = Connections()
    connections.add(ConnectionSocket(), BOB)
    assert connections.concern(CONV)
    assert not connections.concern("ann+eve")
    assert not connections.concern("#group")


def test_what_is_kept_nowhere_waits_for_the_welcome() -> None:
    socket, here = ConnectionSocket(), PresenceFrame("ann", c.ONLINE)
    bob = Connections().add(socket, BOB)
    bob.pass_on(here)
    assert socket.pushed == []
    bob.greeted()
    assert socket.pushed == [here]
