"""Recordings: inspector messages of every machine, with no secret and no content by accident."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from guardchart import InspectorPlugin, JsonLinesSink, read_recording
from guardchart.errors import NotSupportedError, RecordingError
from guardchart.runtime import MachineLogic, SyncInterpreter, create_machine
from tests.runtime.conftest import Rig

CHILD = {
    "id": "job",
    "initial": "working",
    "states": {"working": {"on": {"FINISH": "over"}}, "over": {"type": "final"}},
}
PARENT = {
    "id": "boss",
    "initial": "idle",
    "context": {"count": 0, "api_key": "sk-live-1234567890abcdef", "note": "fine"},
    "states": {
        "idle": {"on": {"GO": {"target": "busy", "guard": "ready", "actions": "count"}}},
        "busy": {
            "tags": ["waiting"],
            "invoke": {"id": "worker-1", "src": "job", "onDone": "over"},
        },
        "over": {"type": "final"},
    },
}


@pytest.fixture
def installed() -> Iterator[list[Any]]:
    made: list[Any] = []
    yield made
    for each in made:
        each.uninstall()


def logic() -> MachineLogic:
    return MachineLogic(
        actions={"count": lambda context, event: {"count": context["count"] + 1}},
        guards={"ready": lambda context, event: True},
        services={"job": create_machine(CHILD)},
    )


def kinds(messages: list[dict[str, Any]], session: str) -> list[str]:
    return [
        m["type"].removeprefix("@xstate.") + ":" + str(m.get("event", {}).get("type", ""))
        for m in messages
        if m["sessionId"] == session
    ]


async def test_an_installed_inspector_records_a_machine_and_each_child_as_its_own_session(
    rig: Rig, installed: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    sink = JsonLinesSink(path)
    installed.append(InspectorPlugin(sink).install())
    boss = await rig.start(PARENT, logic())
    await rig.send(boss, "GO")
    (worker,) = boss.actors.values()
    await rig.send(worker, "FINISH")
    sink.close()
    messages = read_recording(path)
    assert {m["sessionId"] for m in messages} == {"boss", "boss:worker-1"}
    assert {m["rootId"] for m in messages} == {"boss"}
    assert kinds(messages, "boss") == [
        "actor:",
        "event:xstate.init",
        "snapshot:xstate.init",
        "event:GO",
        "snapshot:GO",
        "event:xstate.done.actor.worker-1",
        "snapshot:xstate.done.actor.worker-1",
        "snapshot:xstate.done.actor.worker-1",
    ]
    actors = [m for m in messages if m["type"] == "@xstate.actor"]
    assert [a.get("parentId") for a in actors] == [None, "boss"]
    assert [a["name"] for a in actors] == ["boss", "job"]
    ends = [m["snapshot"]["status"] for m in messages if m["type"] == "@xstate.snapshot"]
    assert ends[-1] == "done" and "active" in ends
    waiting = next(m for m in messages if m.get("snapshot", {}).get("value") == "busy")
    assert waiting["snapshot"]["tags"] == ["waiting"]


async def test_a_recording_names_states_and_events_and_no_content_unless_asked(rig: Rig) -> None:
    messages: list[dict[str, Any]] = []
    live = await rig.start(PARENT, logic(), plugins=[InspectorPlugin(messages.append)])
    await rig.send(live, "GO", password="hunter2", amount=7)
    text = json.dumps(messages)
    assert "hunter2" not in text and "sk-live" not in text and "amount" not in text
    assert all(m["snapshot"]["context"] == {} for m in messages if "snapshot" in m)


async def test_what_is_asked_for_is_recorded_without_its_secrets(rig: Rig) -> None:
    messages: list[dict[str, Any]] = []
    plugin = InspectorPlugin(
        messages.append,
        context_allowlist=["count", "api_key"],
        include_payloads=True,
        payload_allowlist=["password", "amount"],
    )
    live = await rig.start(PARENT, logic(), plugins=[plugin])
    await rig.send(live, "GO", password="hunter2", amount=7, other="left out")
    seen = next(m for m in messages if m.get("event", {}).get("type") == "GO")
    assert seen["event"] == {"type": "GO", "password": "***", "amount": 7}
    contexts = [
        m["snapshot"]["context"] for m in messages if m["sessionId"] == "boss" and "snapshot" in m
    ]
    assert contexts[-1] == {"count": 1, "api_key": "***"}
    text = json.dumps(messages)
    assert "hunter2" not in text and "sk-live" not in text and "left out" not in text


async def test_a_written_context_is_recorded_where_its_key_is(rig: Rig) -> None:
    messages: list[dict[str, Any]] = []
    plugin = InspectorPlugin(messages.append, context_allowlist=["count"])
    live = await rig.start(PARENT, logic(), plugins=[plugin])
    before = len(messages)
    live.update_context({"note": "unseen"})
    assert len(messages) == before
    live.update_context({"count": 4})
    assert messages[-1]["snapshot"]["context"] == {"count": 4}


def test_the_definition_draws_the_chart() -> None:
    messages: list[dict[str, Any]] = []
    SyncInterpreter(
        create_machine(PARENT, logic()), plugins=[InspectorPlugin(messages.append)]
    ).start().stop()
    definition = json.loads(messages[0]["definition"])
    assert definition["initial"] == "idle" and definition["context"] == {}
    assert definition["states"]["idle"]["on"]["GO"] == [
        {"target": ["#boss.busy"], "guard": "ready", "actions": ["count"]}
    ]
    assert definition["states"]["busy"]["invoke"] == [{"id": "worker-1", "src": "job"}]
    assert definition["states"]["over"]["type"] == "final"


def test_a_machine_in_error_is_recorded_with_the_class_name_alone() -> None:
    messages: list[dict[str, Any]] = []

    def broken(context: Any, event: Any) -> None:
        raise ValueError("password=hunter2")

    chart = {
        "id": "m",
        "initial": "a",
        "actionErrorPolicy": "fail",
        "states": {"a": {"on": {"GO": {"target": "b", "actions": "broken"}}}, "b": {}},
    }
    machine = create_machine(chart, MachineLogic(actions={"broken": broken}))
    live = SyncInterpreter(machine, plugins=[InspectorPlugin(messages.append)]).start()
    live.send("GO")
    assert live.status == "error"
    assert messages[-1]["snapshot"]["status"] == "error"
    assert messages[-1]["snapshot"]["error"] == "ValueError"
    assert "hunter2" not in json.dumps(messages)


def test_a_child_named_after_a_secret_is_recorded_without_it() -> None:
    messages: list[dict[str, Any]] = []
    secret = "sk-live-4242424242424242"

    def hire(scope: Any, context: Any, event: Any, action: Any) -> None:
        scope.spawn(create_machine(CHILD), id=event.payload["id"])

    chart = {"id": "m", "initial": "a", "states": {"a": {"on": {"HIRE": {"actions": "hire"}}}}}
    machine = create_machine(chart, MachineLogic(actions={"hire": hire}))
    live = SyncInterpreter(machine, plugins=[InspectorPlugin(messages.append)]).start()
    live.send("HIRE", id=secret)
    assert len(live.actors) == 1
    live.stop()
    assert "m:***" in {m["sessionId"] for m in messages}
    assert secret not in json.dumps(messages)


def test_two_machines_of_one_chart_are_two_sessions() -> None:
    messages: list[dict[str, Any]] = []
    plugin = InspectorPlugin(messages.append)
    machine = create_machine(CHILD)
    for _ in range(3):
        SyncInterpreter(machine, plugins=[plugin]).start().stop()
    assert list(dict.fromkeys(m["sessionId"] for m in messages)) == ["job", "job#2", "job#3"]


def test_installing_twice_or_naming_it_too_records_once(installed: list[Any]) -> None:
    messages: list[dict[str, Any]] = []
    plugin = InspectorPlugin(messages.append)
    installed.append(plugin)
    assert plugin.install() is plugin
    plugin.install()
    SyncInterpreter(create_machine(CHILD), plugins=[plugin]).start().stop()
    assert [m["type"] for m in messages].count("@xstate.actor") == 1
    plugin.uninstall()
    SyncInterpreter(create_machine(CHILD)).start().stop()
    assert [m["type"] for m in messages].count("@xstate.actor") == 1


def test_a_plugin_with_an_async_hook_cannot_be_installed() -> None:
    from guardchart.runtime._plugins import install

    class Wrong:
        async def on_done(self, interpreter: Any, output: Any) -> None: ...

    with pytest.raises(NotSupportedError, match="async"):
        install(Wrong())


def test_a_sink_that_raises_is_reported_once_and_disturbs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(message: Any) -> None:
        raise OSError("disk full: password=hunter2")

    plugin = InspectorPlugin(broken)
    with caplog.at_level(logging.WARNING, logger="guardchart"):
        live = SyncInterpreter(create_machine(CHILD), plugins=[plugin]).start()
        live.send("FINISH")
    assert live.status == "done"
    assert plugin.lost > 3
    assert [r.getMessage() for r in caplog.records if "OSError" in r.getMessage()] == [
        "a sink (function) raised OSError; what it does not take is lost"
    ]


# Sinks


def test_lines_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    with JsonLinesSink(path) as sink:
        threads = [
            threading.Thread(
                target=lambda n=n: [sink.send({"n": n, "pad": "x" * 5000}) for _ in range(20)]
            )
            for n in range(8)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == 160 and {each["n"] for each in found} == set(range(8))


def test_a_line_is_one_line_whatever_stands_in_it() -> None:
    stream = io.StringIO()
    hostile = "a\nb\u2028c\u0085d\x1b[31m\ud800"
    JsonLinesSink(stream).send({"text": hostile, "path": Path("x")})
    (line,) = stream.getvalue().splitlines()
    assert line.isascii()
    assert json.loads(line) == {"text": hostile, "path": "x"}


def test_a_file_that_is_copied_and_truncated_goes_on_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with JsonLinesSink(path) as sink:
        sink.send({"n": 1})
        path.write_text("")
        sink.send({"n": 2})
    assert path.read_text() == '{"n":2}\n'


def test_a_closed_sink_says_so_and_closing_twice_is_fine(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "t.jsonl")
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.send({})


def test_a_sink_whose_folder_is_missing_fails_when_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        JsonLinesSink(tmp_path / "no" / "t.jsonl")


# Reading


def test_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonLinesSink(path) as sink:
        SyncInterpreter(create_machine(CHILD), plugins=[InspectorPlugin(sink)]).start().stop()
    whole = read_recording(path)
    path.write_text(path.read_text() + '{"type":"@xstate.ev')
    assert read_recording(path) == whole


@pytest.mark.parametrize(
    "text",
    ["", "\n", '{"kind":"model_call","ts":1}\n', "[1]\n", "nonsense\n", '{"type":1}\n', "\0\n"],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(RecordingError, match="not a recording"):
        read_recording(path)


def test_a_trace_is_not_a_recording(tmp_path: Path) -> None:
    from guardchart.agents import AgentTracePlugin, FakeModel, run_agent_sync

    path = tmp_path / "trace.jsonl"
    trace = AgentTracePlugin(path)
    run_agent_sync(FakeModel([{"text": "hi"}], is_async=False), prompt="x", plugins=[trace])
    trace.close()
    with pytest.raises(RecordingError, match="no inspector messages.*not a recording"):
        read_recording(path)
