"""A msg_id is the same whenever it is minted, and fits one command of one device."""

from __future__ import annotations

import pytest

from duly.errors import Malformed
from duly.wire.task_ids import SECRET_SIZE, TaskIds, read_task_id

IDS = TaskIds(bytes(range(SECRET_SIZE)))


@pytest.mark.parametrize("seq_id", ["1700000000000_4", "a:b", "x" * 100, "ü"])
def test_it_can_be_taken_apart_and_fits_its_device_alone(seq_id: str) -> None:
    msg_id = IDS.mint("lock", "phone", seq_id)
    assert msg_id == TaskIds(bytes(range(SECRET_SIZE))).mint("lock", "phone", seq_id)
    task = read_task_id(msg_id)
    assert (task.app, task.seq_id) == ("phone", seq_id)
    assert IDS.known(task)
    assert IDS.fits(task, "lock")
    assert not IDS.fits(task, "lamp")
    assert not TaskIds(bytes(SECRET_SIZE)).known(task)


@pytest.mark.parametrize(
    "msg_id", ["phone:1_1", "phone:1_1:", "phone:1_1:" + "A" * 24, "phone:1_1:short", ":::"]
)
def test_what_was_not_minted_fits_no_device(msg_id: str) -> None:
    task = read_task_id(msg_id)
    assert not IDS.known(task)
    assert not IDS.fits(task, "lock")


def test_the_tag_of_one_command_does_not_fit_another_nor_one_that_is_cut_differently() -> None:
    tag = read_task_id(IDS.mint("lock", "phone", "1_1")).tag
    for other in ("phone:1_2", "phon:e1_1", "pad:1_1"):
        assert not IDS.known(read_task_id(f"{other}:{tag}"))


def test_without_a_colon_it_is_no_task_of_a_hub() -> None:
    with pytest.raises(Malformed, match="msg_id of the task"):
        read_task_id("msg001")
