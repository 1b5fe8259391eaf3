from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from guardchart.errors import AgentConfigError, SnapshotTamperedError
from guardchart.gate import Seal

KEY, NEWER = "k" * 16, b"\x00" * 32
DATA: dict[str, Any] = {"context": {"n": 1, "é": [1.5, None, True]}, "state_ids": ["m.a"]}
SEALED = Seal(KEY).seal(DATA, thread="t", machine="m")


def test_a_sealed_snapshot_opens_to_what_it_was() -> None:
    assert Seal(KEY).open(SEALED, thread="t", machine="m") == DATA
    again = json.loads(json.dumps(SEALED))
    assert Seal(KEY).open(again, thread="t", machine="m") == DATA
    assert "seal" not in DATA


@pytest.mark.parametrize(
    ("thread", "machine"), [("t2", "m"), ("t", "m2"), ("", "m"), ("t", ""), ("m", "t")]
)
def test_a_seal_is_bound_to_its_thread_and_machine(thread: str, machine: str) -> None:
    with pytest.raises(SnapshotTamperedError):
        Seal(KEY).open(SEALED, thread=thread, machine=machine)


def test_every_change_breaks_the_seal() -> None:
    changes: list[dict[str, Any]] = [
        {**SEALED, "context": {"n": 2, "é": [1.5, None, True]}},
        {**SEALED, "context": {"n": True, "é": [1.5, None, True]}},
        {**SEALED, "context": {"n": 1.0, "é": [1.5, None, True]}},
        {**SEALED, "extra": 1},
        {k: v for k, v in SEALED.items() if k != "state_ids"},
        {k: v for k, v in SEALED.items() if k != "seal"},
        {**SEALED, "seal": None},
        {**SEALED, "seal": SEALED["seal"][:-1]},
        {**SEALED, "seal": SEALED["seal"].upper()},
        {**SEALED, "seal": SEALED["seal"] + "é"},
        {**SEALED, "seal": [SEALED["seal"]]},
        {**SEALED, "context": object()},
        {**SEALED, "context": float("nan")},
    ]
    for changed in changes:
        with pytest.raises(SnapshotTamperedError):
            Seal(KEY).open(changed, thread="t", machine="m")


def test_keys_rotate_and_the_newest_signs() -> None:
    both = Seal([NEWER, KEY])
    assert both.open(SEALED, thread="t", machine="m") == DATA
    resealed = both.seal(SEALED, thread="t", machine="m")
    assert Seal(NEWER).open(resealed, thread="t", machine="m") == DATA
    with pytest.raises(SnapshotTamperedError):
        Seal(KEY).open(resealed, thread="t", machine="m")


def test_a_seal_of_one_purpose_does_not_fit_another() -> None:
    seal = Seal(KEY)
    mark = seal.sign(DATA, thread="t", machine="m", purpose="decision")
    assert seal.fits(mark, DATA, thread="t", machine="m", purpose="decision")
    assert not seal.fits(mark, DATA, thread="t", machine="m")


@pytest.mark.parametrize("key", ["short", b"", [], [KEY, "short"], 7, [None]])
def test_a_key_that_is_too_short_is_a_config_error(key: Any) -> None:
    with pytest.raises((AgentConfigError, TypeError)):
        Seal(key)


def test_a_seal_tells_nobody_its_key() -> None:
    seal = Seal(KEY)
    assert KEY not in repr(seal)
    with pytest.raises(TypeError):
        pickle.dumps(seal)
    with pytest.raises(TypeError):
        copy.deepcopy(seal)
