"""Measures one library's tool loop; run by `benchmarks.loop`, in that library's environment.

Reads one JSON request a line, ``{"case": ..., "rounds": n}``, and answers each with one line,
``{"us": ...}``: CPU time in microseconds, the best of about n runs, per tool round, per turn at a
conversation of 199 messages (``held``), or for a whole conversation of 200 (``chat``).
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

HELD = 199
ROUNDS = 100
QUESTION = "Where is order 42?"
ANSWER = "It is on its way."


def lookup(order_id: int) -> str:
    """Look up an order."""
    return f"order {order_id}: shipped"


def conversation() -> list[dict[str, Any]]:
    """Return the messages that a long conversation holds already."""
    return [
        {
            "role": "user" if n % 2 == 0 else "assistant",
            "content": f"message {n}: what of order {n}?",
        }
        for n in range(HELD)
    ]


class Script:
    """A model that asks for one tool a round, then answers; it keeps nothing of what it sees."""

    is_async = False
    bounded = True  # it answers at once, so its library need not watch over it

    def __init__(self, response: Any, call: Any, calls: int) -> None:
        self._response = response
        self._call = call
        self._calls = calls
        self._left = calls
        self._ids = itertools.count()

    def __call__(self, messages: Any, tools: Any) -> Any:
        if self._left:
            self._left -= 1
            asked = self._call(f"call_{next(self._ids)}", "lookup", {"order_id": 42})
            return self._response(None, (asked,))
        self._left = self._calls
        return self._response(ANSWER, ())


class Ours:
    """guardchart."""

    def __init__(self, calls: int) -> None:
        from guardchart.agents import (
            ModelResponse,
            ToolCall,
            agent_logic,
            load_chart,
            run_agent_sync,
            tool_registry,
        )
        from guardchart.kernel import create_machine, dump, initial_transition

        model = Script(ModelResponse, ToolCall, calls)
        logic = agent_logic(model, tool_registry(lookup), budgets={"max_turns": None})
        self._machine = create_machine(load_chart(), logic)
        self._run = run_agent_sync
        self.idle: dict[str, Any] = dump(initial_transition(self._machine)[0])

    def fresh(self) -> Any:
        """A new conversation of one turn."""
        return self._run(self._machine, prompt=QUESTION, max_model_calls=1_000)

    def turn(self, saved: str) -> str:
        """The next turn of a saved conversation, saved again."""
        return json.dumps(self._run(self._machine, prompt=QUESTION, snapshot=saved).snapshot)


class Peer:
    """The peer, by the same functions."""

    def __init__(self, calls: int) -> None:
        from xstate_statemachine import (  # type: ignore[import-not-found]
            SyncInterpreter,
            create_machine,
        )
        from xstate_statemachine.contrib.agents import (  # type: ignore[import-not-found]
            ModelResponse,
            ToolCall,
            agent_logic,
            load_chart,
            run_agent_sync,
            tool_registry,
        )

        model = Script(ModelResponse, ToolCall, calls)
        logic = agent_logic(model, tool_registry(lookup), budgets={"max_turns": None}, sync=True)
        self._machine = create_machine(load_chart(), logic=logic)
        self._run = run_agent_sync
        self._interpreter = SyncInterpreter
        interpreter = SyncInterpreter(self._machine).start()
        self.idle: dict[str, Any] = json.loads(interpreter.get_snapshot())
        interpreter.stop()

    def fresh(self) -> Any:
        """A new conversation of one turn."""
        return self._run(self._machine, prompt=QUESTION)

    def turn(self, saved: str) -> str:
        """The next turn of a saved conversation, saved again."""
        data = json.loads(saved)
        if data["state_ids"] != self.idle["state_ids"]:
            # A finished machine takes no START; its messages are carried over by hand.
            data = {**self.idle, "context": {**self.idle["context"], **_kept(data["context"])}}
        interpreter = self._interpreter.from_snapshot(json.dumps(data), self._machine).start()
        interpreter.send("START", prompt=QUESTION)
        text: str = interpreter.get_snapshot()
        interpreter.stop()
        return text


def _kept(context: dict[str, Any]) -> dict[str, Any]:
    return {key: context[key] for key in ("messages", "spent_call_ids") if key in context}


def _best(run: Callable[[], Any], check: Callable[[Any], None], rounds: int) -> float:
    spent = []
    for n in range(rounds + 2):
        start = time.process_time()
        result = run()
        took = time.process_time() - start
        check(result)
        if n >= 2:  # the first ones warm caches up
            spent.append(took)
    return min(spent) * 1e6


def _answered(turns: int) -> Callable[[Any], None]:
    def check(result: Any) -> None:
        if result.output != ANSWER or result.usage["turns"] != turns:
            raise SystemExit(f"the run did not finish: {result.final_state}, {result.error}")

    return check


def _holds(messages: int) -> Callable[[Any], None]:
    def check(saved: str) -> None:
        found = len(json.loads(saved)["context"]["messages"])
        if found != messages:
            raise SystemExit(f"the conversation holds {found} messages, not {messages}")

    return check


def measure(library: str, case: str, rounds: int) -> float:
    """Measure one case; see the module."""
    made = Ours if library == "guardchart" else Peer
    name, _, size = case.partition(":")
    if name == "rounds":
        calls = int(size)
        one = made(calls)
        # As many rounds in each sample, however they are cut up: the best of many short ones
        # would be luckier than the best of as many long ones.
        loops = max(ROUNDS // calls, 1)

        def run() -> Any:
            for _ in range(loops - 1):
                one.fresh()
            return one.fresh()

        return _best(run, _answered(calls + 1), rounds) / (loops * calls)
    one = made(0)
    if name == "held":
        data = {**one.idle, "context": {**one.idle["context"], "messages": conversation()}}
        saved = json.dumps(data)
        return _best(lambda: one.turn(saved), _holds(200), 10 * rounds)  # 201, cut to 200

    def chat() -> str:
        saved = json.dumps(one.idle)
        for _ in range(100):
            saved = one.turn(saved)
        return saved

    return _best(chat, _holds(200), max(rounds // 10, 2))


def main() -> None:
    """Answer requests until the input ends."""
    library = sys.argv[1]
    for line in sys.stdin:
        request = json.loads(line)
        spent = measure(library, request["case"], request["rounds"])
        print(json.dumps({"us": spent}), flush=True)


if __name__ == "__main__":
    main()
