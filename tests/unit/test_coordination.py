"""A process's place in a save, and the deadline of its waits."""

from __future__ import annotations

import pytest

from distckpt.coordination import Participant, ProgressDeadline


@pytest.mark.parametrize(
    ("is_coordinator", "use_collectives", "publishes"),
    [(True, True, True), (False, True, False), (True, False, True), (False, False, True)],
)
def test_who_publishes(is_coordinator: bool, use_collectives: bool, publishes: bool) -> None:
    assert Participant(1, is_coordinator, use_collectives).publishes is publishes


def test_a_process_alone_publishes() -> None:
    assert Participant() == Participant(0, True, True)
    assert Participant().publishes


def test_a_deadline_moves_on_with_progress_only() -> None:
    now = [100.0]
    deadline = ProgressDeadline(10, clock=lambda: now[0])
    passed = []
    for now[0] in (110, 110.1):
        passed.append(deadline.passed)
    deadline.progress()
    for now[0] in (110.1, 120, 120.2):
        passed.append(deadline.passed)
    assert passed == [False, True, False, False, True]
