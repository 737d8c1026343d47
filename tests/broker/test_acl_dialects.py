"""The rules as text. What brokers make of them is in test_acl_check.py; for EMQX, which cannot be had here, a
small reading of its documented syntax stands in."""

from __future__ import annotations

import re
import shlex

import pytest

from duly.broker.acl_dialects import LANGUAGES, NO_PASSWORD, RulesRequest, emqx, mosquitto, nats, rabbitmq
from duly.broker.verify import sample_filters, sample_topics
from duly.core.acl import AccountClass, Act, covers, decide
from duly.errors import Malformed

WANTED = RulesRequest(users=["A", "B"], admins=["boss"])
MIXED = RulesRequest(users=["A", "B"], devices=["lamp", "lock"], hub="hub", admins=["boss"])


def emqx_says(rules: str, user: str, act: Act, topic: str) -> bool:
    """The first rule that matches decides; ${username} is put in."""
    for line in rules.splitlines():
        if line.startswith("%%"):
            continue
        found = re.fullmatch(
            r'\{(allow|deny), (all|\{username, "([^"]*)"\})(?:, (publish|subscribe|all), \[(.*)\])?\}\.', line
        )
        assert found, f"not an EMQX rule: {line}"
        word, who, name, what, topics = found.groups()
        wanted = re.findall(r'"([^"]*)"', topics or '"#"')
        if who != "all" and name != user:
            continue
        if what not in (None, "all", act.value):
            continue
        if topics is None or any(covers(each.replace("${username}", user), topic) for each in wanted):
            return word == "allow"
    raise AssertionError("the last rule denies everything")


@pytest.mark.parametrize("prefix", ["nodes", "plant/7"])
def test_emqx_reads_what_the_table_says(prefix: str) -> None:
    rules = emqx(RulesRequest(prefix=prefix, admins=["boss"]))
    assert "$1" not in rules.replace("not $1)", ""), "which would match nothing"
    for user in ("A", "B"):
        for topic in sample_topics(["A", "B"], prefix):
            may = decide(Act.PUBLISH, user, topic, prefix)
            assert emqx_says(rules, user, Act.PUBLISH, topic) is may.allowed, topic
        for topic in sample_filters(["A", "B"], prefix):
            may = decide(Act.SUBSCRIBE, user, topic, prefix)
            assert emqx_says(rules, user, Act.SUBSCRIBE, topic) is may.allowed, topic
    assert emqx_says(rules, "boss", Act.SUBSCRIBE, "#")
    assert emqx_says(rules, "boss", Act.PUBLISH, f"{prefix}/A/status")


def test_rabbitmq_patterns_say_what_the_table_says() -> None:
    calls = [shlex.split(line) for line in rabbitmq(WANTED).splitlines() if line.startswith("rabbitmqctl")]
    topics = {words[5]: words[7:] for words in calls if words[1] == "set_topic_permissions"}
    for user in ("A", "B"):
        write, read = topics[user]
        for topic in sample_topics(["A", "B"], "nodes"):
            key = topic.replace("/", ".")
            assert bool(re.search(write, key)) is decide(Act.PUBLISH, user, topic, "nodes").allowed
        for topic in sample_filters(["A", "B"], "nodes"):
            key = topic.replace("/", ".").replace("+", "*")
            assert bool(re.search(read, key)) is decide(Act.SUBSCRIBE, user, topic, "nodes").allowed


@pytest.mark.parametrize("language", ["emqx", "rabbitmq"])
def test_devices_and_nodes_are_kept_apart(language: str) -> None:
    rules = LANGUAGES[language](MIXED)
    calls = [shlex.split(line) for line in rules.splitlines() if line.startswith("rabbitmqctl")]
    keys = {words[5]: words[7:] for words in calls if words[1] == "set_topic_permissions"}
    classes = {"A": AccountClass.NODE, "lamp": AccountClass.DEVICE, "hub": AccountClass.HUB}
    everybody = ["A", "B", "lamp", "lock", "hub"]
    for user, of in classes.items():
        for act, tried in ((Act.PUBLISH, sample_topics), (Act.SUBSCRIBE, sample_filters)):
            for topic in tried(everybody, "nodes"):
                may = decide(act, user, topic, "nodes", of, MIXED.users).allowed
                if language == "emqx":
                    assert emqx_says(rules, user, act, topic) is may, (user, act, topic)
                else:
                    pattern = keys[user][0 if act is Act.PUBLISH else 1]
                    assert bool(re.search(pattern, topic.replace("/", ".").replace("+", "*"))) is may


def test_devices_need_a_hub_and_no_other_user_is_called_hub() -> None:
    with pytest.raises(Malformed, match="--hub"):
        RulesRequest(devices=["lamp"])
    with pytest.raises(Malformed, match="the hub's own"):
        RulesRequest(users=["hub"], hub="boss")


def test_a_rabbitmq_user_has_his_own_sessions_only() -> None:
    calls = [shlex.split(line) for line in rabbitmq(WANTED).splitlines() if line.startswith("rabbitmqctl")]
    queues = next(words[6] for words in calls if words[1] == "set_permissions" and words[5] == "A")
    for client_id, may in (
        ("A", True),
        ("A-0123456789ab", True),
        ("B", False),
        ("Ab", False),
        ("A-b", False),
    ):
        assert bool(re.search(queues, f"mqtt-subscription-{client_id}qos1")) is may, client_id


def test_a_name_that_could_be_anothers_session_is_refused() -> None:
    with pytest.raises(Malformed, match="client id of 'A'"):
        rabbitmq(RulesRequest(users=["A", "A-0123456789ab"]))


def test_users_yet_to_come_need_no_new_rules_where_the_broker_knows_its_users() -> None:
    assert "%u" in mosquitto(RulesRequest())
    assert "${username}" in emqx(RulesRequest())
    for language in (rabbitmq, nats):
        with pytest.raises(Malformed, match="the name of each user: --users"):
            language(RulesRequest())


def test_whose_password_was_not_given_does_not_get_in_on_nats() -> None:
    assert nats(WANTED).count(NO_PASSWORD) == 3
    assert nats(RulesRequest(users=["A"], passwords={"A": "$2b$04$x"})).count(NO_PASSWORD) == 0


@pytest.mark.parametrize("name", ["", "a/b", "+", "#", "a+", "a\0b", "a\nuser boss", "a\x1fb", "x" * 201])
@pytest.mark.parametrize("language", LANGUAGES)
def test_names_that_reach_beyond_themselves_are_refused(language: str, name: str) -> None:
    with pytest.raises(Malformed if len(name) < 200 else Exception):
        LANGUAGES[language](RulesRequest(users=[name, "B"]))
    with pytest.raises(Malformed if len(name) < 200 else Exception):
        LANGUAGES[language](RulesRequest(users=["A", "B"], admins=[name]))


@pytest.mark.parametrize(
    ("language", "name"),
    [
        ("rabbitmq", "a.b"),
        ("rabbitmq", "a b"),
        ("rabbitmq", "a%2Eb"),
        ("nats", "a b"),
        ("nats", "*"),
        ("nats", ">"),
    ],
)
def test_names_that_mean_something_to_one_broker_are_refused_there(language: str, name: str) -> None:
    with pytest.raises(Malformed):
        LANGUAGES[language](RulesRequest(users=[name]))


@pytest.mark.parametrize("prefix", ["", "a//b", "nodes/#", "+", "a%u", "${username}", "a b", 'a"b'])
def test_prefixes_that_mean_more_are_refused(prefix: str) -> None:
    with pytest.raises(Malformed):
        RulesRequest(prefix=prefix)


@pytest.mark.parametrize("name", ["{username}", "(x)?", "a|b", "[ab]", "a$", "^"])
def test_a_name_is_no_pattern_to_rabbitmq(name: str) -> None:
    line = next(line for line in rabbitmq(RulesRequest(users=[name])).splitlines() if "set_topic" in line)
    read = shlex.split(line)[-1]
    assert "{username}" not in read
    python = re.sub(r"\\x\{([0-9a-f]+)\}", lambda code: re.escape(chr(int(code[1], 16))), read)
    assert re.search(python, f"nodes.{name}.pending")
    assert not re.search(python, "nodes.other.pending")


def test_no_user_is_named_twice() -> None:
    with pytest.raises(Malformed, match="named twice"):
        RulesRequest(users=["A"], admins=["A"])
