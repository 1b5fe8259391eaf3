"""The judge of the negative control: nothing but a failure in the test's own body counts."""

from __future__ import annotations

import pytest

from tests.promises.negative_control import outcomes, verdict

JUNIT = """<testsuites><testsuite>
<testcase classname="t" name="red"><failure/></testcase>
<testcase classname="t" name="red_then_teardown"><failure/></testcase>
<testcase classname="t" name="red_then_teardown"><error/></testcase>
<testcase classname="t" name="setup"><error/></testcase>
<testcase classname="t" name="skipped"><skipped/></testcase>
<testcase classname="t" name="green"/>
</testsuite></testsuites>"""


def test_outcomes_are_read_from_the_report() -> None:
    assert outcomes(JUNIT) == {
        "t::red": "failed",
        "t::red_then_teardown": "failed",
        "t::setup": "error",
        "t::skipped": "skipped",
        "t::green": "passed",
    }


@pytest.mark.parametrize("outcome", ["passed", "skipped", "error"])
def test_verdict_is_bad_when_one_test_did_not_fail(outcome: str) -> None:
    code, lines = verdict(1, {"t::a": "failed", "t::b": outcome})
    assert code == 1
    assert lines[0] == f"{outcome}: t::b"
    assert lines[-1].startswith("without the gate 1 of 2")


def test_verdict_is_good_when_all_failed_or_none_exist() -> None:
    assert verdict(1, {"t::a": "failed"})[0] == 0
    assert verdict(5, {})[0] == 0


@pytest.mark.parametrize("code", [0, 2, 5])
def test_verdict_is_bad_when_pytest_ended_otherwise(code: int) -> None:
    assert verdict(code, {"t::a": "failed"})[0] == 1
