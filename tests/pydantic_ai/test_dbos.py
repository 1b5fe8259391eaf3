"""Under `DBOSDurability`: one step a call, and no second entry over forks and recoveries."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dbos import DBOS
from pydantic_ai import Agent
from pydantic_ai.durable_exec.dbos import DBOSDurability
from pydantic_ai.exceptions import UserError

from guardchart.pydantic_ai import StatechartGuard
from tests.pydantic_ai.agents import Script, session
from tests.pydantic_ai.durable import POINTS, Durable

ROOT = Path(__file__).resolve().parents[2]
CALL = "desk__capability__desk.call"
STEPS = ["desk__model.request", CALL, CALL, CALL, CALL, CALL, "desk__model.request"]


@pytest.fixture
def engine() -> Iterator[None]:
    yield
    DBOS.destroy(destroy_registry=True)


async def finished(workflow: Any, *args: Any) -> tuple[Any, str]:
    handle = await DBOS.start_workflow_async(workflow, *args)
    return await handle.get_result(polling_interval_sec=0.05), handle.workflow_id


async def test_each_call_is_one_step_and_a_fork_at_any_step_enters_nothing_again(
    tmp_path: Path, engine: None
) -> None:
    durable = Durable(tmp_path)
    DBOS.launch()
    output, ident = await finished(durable.workflow, "hello")
    assert output == "refunded ['desk.closed']" and durable.refunds == ["7"]
    steps = [each["function_name"] for each in await DBOS.list_workflow_steps_async(ident)]
    assert steps == STEPS
    for number in range(1, len(steps) + 1):
        fork = await DBOS.fork_workflow_async(ident, number)
        assert await fork.get_result(polling_interval_sec=0.05) == output
        assert durable.refunds == ["7"]


async def test_a_guard_without_a_scope_is_refused_inside_a_workflow(
    tmp_path: Path, engine: None
) -> None:
    durable = Durable(tmp_path, scope=None)
    DBOS.launch()
    with pytest.raises(UserError, match=r"needs id= and scope="):
        await finished(durable.workflow, "hello")
    assert durable.refunds == []


def test_a_guard_without_an_id_is_refused_when_the_agent_is_made() -> None:
    with pytest.raises(UserError, match="id"):
        Agent(
            Script("done").model,
            name="nameless",
            capabilities=[DBOSDurability(), StatechartGuard(session(), scope="a")],
        )


async def test_outside_of_a_workflow_the_same_agent_runs_as_ever(
    tmp_path: Path, engine: None
) -> None:
    durable = Durable(tmp_path)
    chart = session()
    durable.guard._runner = chart
    result = await durable.agent.run("hello")
    assert [each.tool_name for each in result.output.approvals] == ["refund", "close"]


@pytest.mark.slow
@pytest.mark.needs_src
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", POINTS)
def test_a_process_killed_at_any_point_is_recovered_without_a_second_entry(
    point: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.pydantic_ai.durable", str(tmp_path), point]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert killed.returncode == 9, killed.stderr
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout.splitlines()[-1])
    if point.startswith("body"):
        assert "in doubt" in found["output"]
        assert found["refunds"] == (["7"] if point == "body-after" else [])
    else:
        assert found["output"] == "refunded ['desk.closed']" and found["refunds"] == ["7"]
    assert found["steps"][0] == "desk__model.request"
