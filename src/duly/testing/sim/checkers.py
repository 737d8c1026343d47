"""The checkers of every world: they judge what devices did, what senders learned and what was committed.

Each checker yields sentences; a sentence is a violation. Checkers do not know machines or engines, so a
bug there cannot hide itself here. The promises that they stand for are in brackets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final, TypeAlias, TypeVar

from duly.core import operations as w
from duly.core.inbox import Inbox
from duly.core.lifecycle import State, can_move
from duly.core.messages import Message, Mode, Verdict, VerdictKind, key_of, names_in
from duly.core.outbox import Outbox
from duly.core.units import SECOND
from duly.storage.memory import Disk
from duly.testing.loops import LoopClock
from duly.testing.sim.world import WantedMessage, World

CLOCKS_DIFFER: Final = 120 * SECOND
"""An upper limit of the differences between the clocks of a world, except those that are wrong by days."""

Finding: TypeAlias = tuple[str, bytes]
"""A sentence, and the key of the message that it is about; empty if it is about none."""

W = TypeVar("W", bound=World)
Checker: TypeAlias = Callable[[W], Iterator[Finding]]
"""Judges a world of one kind after its run."""


def once(world: World) -> Iterator[Finding]:
    """[P2, P3] No effect happens more often than its kind allows."""
    seen: dict[bytes, int] = {}
    for effect in world.log.effects:
        key = effect.message.key
        before = seen.get(key)
        if before is not None and effect.message.kind in world.at_most_once:
            yield "took effect twice, though at most once was declared", key
        elif before == effect.incarnation:
            yield "took effect twice without a crash in between", key
        seen[key] = effect.incarnation
    for key, count in Counter(_ledger_effects(world)).items():
        if count > 1:
            yield f"its effect was committed {count} times", key


def nothing_unwanted(world: World) -> Iterator[Finding]:
    """[P2] Only what a sender wanted takes effect, and only at its recipient."""
    for effect in world.log.effects:
        want = world.log.wanted.get(effect.message.key)
        if want is None or effect.message.body != want.message.body:
            yield "took effect, but was never wanted", effect.message.key
        elif want.message.recipient != effect.receiver:
            yield f"took effect at {effect.receiver}, not at {want.message.recipient}", effect.message.key


def stored(world: World) -> Iterator[Finding]:
    """[P1] What a process has acknowledged as stored is on its disk, whatever happened since."""
    for name, promised in world.settled_promises.items():
        disk = world.settled_disks[name]
        for key in promised:
            if key not in disk.messages and key in world.log.wanted:
                yield f"{name} said it was stored, and it is gone", key


def admitted_once(world: World) -> Iterator[Finding]:
    """[P2] A ledger admits an id only once, even after it has forgotten it."""
    admitted: set[tuple[str, bytes]] = set()
    for name, write, result in world.log.commits:
        match write, result:
            case w.Admit(message=message), Verdict(kind=VerdictKind.FRESH):
                if (name, message.key) in admitted:
                    yield f"{name} admitted it a second time", message.key
                admitted.add((name, message.key))
            case w.Withdraw(key=key), True:
                admitted.discard((name, key))


def states_move_forward(world: World) -> Iterator[Finding]:
    """[P5] States move along the table, and ends do not change."""
    states: dict[tuple[str, bytes], State] = {}
    for name, write, result in world.log.commits:
        match write, result:
            case w.Admit(message=message, state=state), Verdict(kind=VerdictKind.FRESH):
                states[name, message.key] = state
            case w.Advance(key=key, to=to), w.Advanced(moved=True):
                before = states.get((name, key))
                if before is not None and not can_move(before, to):
                    yield f"{name} moved it from {before.word} to {to.word}", key
                states[name, key] = to


def attempts_fenced(world: World) -> Iterator[Finding]:
    """[P3] An attempt begins once, and only the newest one ends or postpones a delivery."""
    newest: dict[tuple[str, w.DeliveryRef], int] = {}
    for name, write, result in world.log.commits:
        match write, result:
            case w.Deliver(ref=ref, attempt=attempt), True:
                newest[name, ref] = attempt
            case w.Take(ref=ref, attempt=attempt), True:
                if attempt != newest.get((name, ref), attempt):
                    yield f"{name} began attempt {attempt + 1} a second time", ref.key
                newest[name, ref] = attempt + 1
            case ((w.Finish(ref=ref, attempt=int(attempt)) | w.Postpone(ref=ref, attempt=attempt)), True):
                if attempt != newest.get((name, ref), attempt):
                    yield f"attempt {attempt} ended it at {name}, where a later one was under way", ref.key


def ordered(world: World) -> Iterator[Finding]:
    """[P4] Per lane and sender, effects happen in the sender's order."""
    marks: dict[tuple[str, str, str, int], int] = {}
    counted: set[bytes] = set()
    for at, receiver, message in _effects_in_order(world):
        want = world.log.wanted[message.key]
        order = message.order
        straggler = want.epoch == 0 and at >= world.log.reinstalled.get(message.scope, at + 1)
        if order is None or message.key in counted or straggler:
            continue  # a reinstalled sender counts from the start: see ADR 4
        counted.add(message.key)
        lane = (receiver, order.key, message.scope, want.epoch)
        if want.n < marks.get(lane, -1):
            yield f"number {want.n} took effect after number {marks[lane]}", message.key
        marks[lane] = max(marks.get(lane, -1), want.n)


def settled(world: World) -> Iterator[Finding]:
    """[P5] After the calm every message has ended everywhere, and its sender has learned how."""
    for name, disk in world.settled_disks.items():
        if name in world.gone:
            continue
        for key, record in disk.messages.items():
            if not record.state.terminal and key in world.log.wanted:
                yield f"{name} still has it as {record.state.word}", key
            elif (
                name.startswith("app") and key not in world.log.outcomes and not _died_after(world, name, key)
            ):
                yield "its sender was never told how it ended", key
        for ref, delivery in disk.deliveries.items():
            if not delivery.state.terminal:
                yield f"{name} still has an open delivery of it", ref.key
    for name, node in world.nodes.items():
        if name in world.gone:
            continue
        machine = node.engine._machine
        left = machine.live + machine.lanes.waiting if isinstance(machine, Inbox) else 0
        left += len(machine.outbox) if isinstance(machine, Inbox) else 0
        left += len(machine) if isinstance(machine, Outbox) else 0
        if left:
            yield f"{name} still holds {left} messages in memory", b""


def one_outcome(world: World) -> Iterator[Finding]:
    """[P2, P5] A message has one outcome: what its sender learned is what the hub has stored, and it is
    true."""
    happened = {effect.message.key for effect in world.log.effects} | set(_ledger_effects(world))
    hub = _hub(world)
    for key, told in world.log.outcomes.items():
        final, answer = told[-1]
        if key in world.log.freed and final is State.FAILED:
            continue
        for (before, _), (after, _) in pairwise(told):
            if before is not State.UNKNOWN or after not in (State.DONE, State.FAILED):
                yield f"its sender was told {before.word}, then {after.word}", key
        if final is State.DONE and key not in happened:
            yield "its sender was told it is done, and nothing happened", key
        silent = final in (State.FAILED, State.EXPIRED, State.SUPERSEDED, State.CANCELLED)
        kind = world.log.wanted[key].message.kind
        if silent and key in happened and kind in world.at_most_once:
            yield f"its sender was told {final.word}, and it happened", key
        record = hub.messages.get(key)
        if record is not None and final is not State.UNKNOWN and record.state is not final:
            yield f"its sender was told {final.word}, the hub has {record.state.word}", key
        if final is State.DONE and answer.data != world.log.wanted[key].message.body:
            yield "its sender was told another answer than the handler gave", key


def informed(world: World) -> Iterator[Finding]:
    """[P5] `unknown` is the last resort: it never stands where the hub knows the end and could have been
    asked."""
    hub = _hub(world)
    for key, told in world.log.outcomes.items():
        record = hub.messages.get(key)
        states = [state for state, _ in told]
        if states == [State.UNKNOWN] and record is not None and record.state is State.DONE:
            want = world.log.wanted[key].message
            through_the_hub = any(
                name == "hub"
                and isinstance(write, w.Advance)
                and write.key == key
                and write.to is State.UNKNOWN
                for name, write, _ in world.log.commits
            )
            if not through_the_hub and not want.expires:
                yield "its sender gave up, though the hub knew that it is done", key


def refusals_explained(world: World) -> Iterator[Finding]:
    """[P5] Every refusal is recorded with its reason; no message is superseded without a later one."""
    recorded = {
        (name, refusal.scope, refusal.id, refusal.word)
        for name, node in world.nodes.items()
        for refusal in node.disk.refusals
    }
    for name, message, verdict in world.log.replies:
        want = world.log.wanted.get(message.key)
        forged = want is not None and want.message.body != message.body
        if forged and verdict.kind in (VerdictKind.FRESH, VerdictKind.DUPLICATE):
            yield f"{name} took other content under its id for the same", message.key
        if verdict.kind not in (VerdictKind.FRESH, VerdictKind.DUPLICATE) and not verdict.retry:
            if (name, message.scope, message.id, verdict.named) not in recorded:
                yield f"{name} refused it as {verdict.named} and did not record why", message.key
            if not verdict.reason:
                yield f"{name} refused it without a reason", message.key
    for key, told in world.log.outcomes.items():
        superseded = world.log.wanted[key]
        if told[-1][0] is State.SUPERSEDED and not any(
            _may_supersede(other, superseded) for other in world.log.wanted.values()
        ):
            yield "was superseded, though nothing came that could", key


def superseded_by_later(world: World) -> Iterator[Finding]:
    """[P4] A message is superseded only by one that was handed over and has not failed. An attempt that
    was under way when its process restarted counts as handed over, whatever becomes of it."""
    handed: dict[str, dict[bytes, State]] = {}
    when: dict[tuple[str, bytes], int] = {}
    for at, (name, write, result) in enumerate(world.log.commits):
        level = _level(name)
        known = handed.setdefault(level, {})
        match write, result:
            case ((w.Deliver(ref=ref, attempt=int(attempt)) | w.Take(ref=ref, attempt=attempt)), True):
                if attempt or isinstance(write, w.Take):
                    known.setdefault(ref.key, State.SENT)
                    when.setdefault((level, ref.key), at)
            case w.Advance(key=key, to=to), w.Advanced(moved=True):
                want = world.log.wanted.get(key)
                if to is State.SUPERSEDED and key not in known and want is not None and _in_replay(want):
                    others = [
                        other.message.key
                        for other in world.log.wanted.values()
                        if other.message.key in known and _may_supersede(other, want)
                    ]
                    since = min((when[level, other] for other in others), default=at)
                    anew = any(_level(who) == level and since <= then <= at for who, then in world.log.anew)
                    if not others:
                        yield f"{name} superseded it, though nothing later was handed over", key
                    elif not anew and {known[other] for other in others} <= _WITHOUT_EFFECT:
                        yield f"{name} superseded it by what had failed", key
                if key in known:
                    known[key] = to


def _in_replay(want: WantedMessage) -> bool:
    return want.message.order is not None and want.message.order.mode is Mode.REPLAY


def _level(name: str) -> str:
    """Return the name under which commits are compared: hubs on one ledger know what the others have handed
    over."""
    return "hub" if name.startswith("hub") else name


_WITHOUT_EFFECT: Final = {State.FAILED, State.EXPIRED, State.CANCELLED, State.SUPERSEDED}


def views_agree(world: World) -> Iterator[Finding]:
    """[P1, P4] The view of each person of every conversation is the hub's: complete, in order, without
    repeats."""
    streams = _hub(world).streams
    for name, convs in world.views().items():
        for conv, seen in convs.items():
            stored = {entry.n: entry.key for entry in streams.get(f"chat/{conv}", ())}
            last: dict[int, int] = {}
            for one in seen:
                key = key_of(one.sender, one.id)
                if stored.get(one.n) != key:
                    yield f"{name} was shown it as {conv} {one.n}, where there is something else", key
                if one.n <= last.get(one.incarnation, 0):
                    yield f"{name} was shown {conv} {one.n} after {last[one.incarnation]}", key
                last[one.incarnation] = one.n
            shown = {one.n for one in seen}
            for n, key in stored.items():
                if n not in shown and names_in(key)[0] != name:
                    yield f"{name} was never shown {conv} {n}", key
    for stream, entries in streams.items():
        if [entry.n for entry in entries] != list(range(1, len(entries) + 1)):
            yield f"{stream} has a gap", b""
        said: dict[tuple[str, int], int] = {}
        for entry in entries:
            want = world.log.wanted.get(entry.key)
            if want is None or not stream.startswith("chat/"):
                continue
            who = (want.message.scope, want.epoch)
            if want.n < said.get(who, -1):
                yield f"{stream} has it before what its sender said earlier", entry.key
            said[who] = want.n
    for name, conv, n in world.log.own:
        stored_keys = {entry.n: entry.key for entry in streams.get(f"chat/{conv}", ())}
        if n not in stored_keys or names_in(stored_keys[n])[0] != name:
            yield f"{name} was told that its line is {conv} {n}, and it is not", stored_keys.get(n, b"")


def done_without_faults(world: World) -> Iterator[Finding]:
    """In a world without faults every message is done, or superseded where only the latest counts."""
    if not world.plan.faultless:
        return
    for key, want in world.log.wanted.items():
        told = world.log.outcomes.get(key)
        latest = want.message.order is not None and want.message.order.mode is Mode.LATEST
        allowed = (State.DONE, State.SUPERSEDED) if latest else (State.DONE,)
        if told is None or told[-1][0] not in allowed:
            yield f"nothing went wrong, and yet it is {told[-1][0].word if told else 'open'}", key


def floor_not_ahead(world: World) -> Iterator[Finding]:
    """A ledger never has a floor in the future, whatever its clocks have shown."""
    now = LoopClock(world.loop).now()
    for name, node in world.nodes.items():
        ahead = node.disk.floor.until - now
        if ahead > CLOCKS_DIFFER:
            yield f"{name} has a floor {ahead / SECOND:.0f} s in the future: all that is sent is stale", b""


CHECKERS: Final[tuple[Checker[World], ...]] = (
    once,
    nothing_unwanted,
    stored,
    admitted_once,
    states_move_forward,
    attempts_fenced,
    ordered,
    settled,
    one_outcome,
    informed,
    refusals_explained,
    superseded_by_later,
    views_agree,
    done_without_faults,
    floor_not_ahead,
)


def _hub(world: World) -> Disk:
    """Return the disk of the hub, or an empty one if there is no hub."""
    return world.settled_disks.get("hub") or Disk()


def _ledger_effects(world: World) -> list[bytes]:
    return [entry.key for node in world.nodes.values() for entry in node.disk.streams.get("effects", ())]


def _effects_in_order(world: World) -> Iterator[tuple[float, str, Message]]:
    """Yield all effects, outside and committed, in the order in which they happened."""
    outside = [(effect.at, effect.receiver, effect.message.key) for effect in world.log.effects]
    inside = [(at, who, key) for at, who, what, key in world.log.lines if what == "EFFECT committed"]
    for at, who, key in sorted(outside + inside, key=lambda item: item[0]):
        want = world.log.wanted.get(key)
        if want is not None:
            yield at, who, want.message


def _died_after(world: World, name: str, key: bytes) -> bool:
    """Return whether the sender died after it had stored the end: then it finds the end in its own ledger."""
    ended = [
        at for at, who, what, about in world.log.lines
        if who == name and about == key and what.startswith("commits ") and State[what[8:].upper()].terminal
    ]  # fmt: skip
    return bool(ended) and any(
        who == name and what in ("dies", "starts") and at >= ended[0] for at, who, what, _ in world.log.lines
    )


def _may_supersede(other: WantedMessage, want: WantedMessage) -> bool:
    """Return whether a message is a later one of the same sender and, where only the latest counts, in the
    same lane."""
    if want.message.order is None or other.message.order is None or other is want:
        return False
    if (other.message.recipient, other.message.order.key) != (want.message.recipient, want.message.order.key):
        return False
    if other.message.scope == want.message.scope:
        # A late message from before a reinstall may supersede the first new ones: see ADR 4.
        return other.epoch != want.epoch or other.n > want.n
    return want.message.order.mode is Mode.LATEST
