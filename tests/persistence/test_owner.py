"""Owner names: this process lives, a reused pid does not count, strangers get the doubt."""

from __future__ import annotations

import subprocess
import sys

import pytest

from guardchart.persistence import owner_alive, owner_id


def test_the_name_of_this_process_is_stable_and_alive():
    assert owner_id() == owner_id()
    assert owner_alive(owner_id())


def test_the_name_is_known_before_the_first_claim_which_may_be_made_on_an_event_loop():
    script = (
        "import os, guardchart.persistence as p\n"
        "def blocks(*a, **k): raise SystemExit('reads a file')\n"
        "os.readlink = blocks\n"
        "print(p.owner_id())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_ended_process_is_not_alive():
    script = "from guardchart.persistence import owner_id; print(owner_id())"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    owner = ended.stdout.strip()
    assert owner != owner_id()
    assert owner_alive(owner) is (sys.platform == "win32")


def test_a_pid_that_was_reused_is_not_the_owner():
    pid, started, rest = owner_id().split(":", 2)
    if started == "0":
        pytest.skip("this system does not tell when a process started")
    assert not owner_alive(f"{pid}:{int(started) + 1}:{rest}")


@pytest.mark.parametrize(
    "owner", ["", "x", "1:2:3@elsewhere", "a:b:c", "99999999999999999999:0:x", "-1:0:x@", "²:0:x"]
)
def test_owners_nobody_here_can_judge_count_as_alive(owner):
    assert owner_alive(owner)
    here = owner_id().partition("@")[2]
    assert owner_alive(f"not-a-pid:0:x@{here}")
    assert owner_alive(f"²:0:x@{here}")
