"""Decisions: a service that has a model choose one event, and hands it to its machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from pydantic import Field

from guardchart.agents._accepted import (
    AllowedEvents,
    as_patterns,
    check_allowed,
    narrowed,
    tool_names,
)
from guardchart.agents._request_logic import (
    Configured,
    FromInput,
    RequestLogic,
    Sampling,
    Settings,
    made_request,
)
from guardchart.agents._requests import (
    AgentDecisionRequest,
    AgentEventDescriptor,
    ChosenEvent,
    DecisionAttempt,
)
from guardchart.agents._resolve import attempts, judged, run_calls, run_calls_sync
from guardchart.agents._stepper import Fed
from guardchart.errors import AgentConfigError, AgentError
from guardchart.kernel import Machine, Snapshot, can
from guardchart.runtime import ServiceScope

__all__ = ["DecideInput", "DecisionLogic", "create_decision_logic", "decide_source"]

ValueOrFn: TypeAlias = Any
"""A value, or a function of the input that gives it."""


class DecideInput(Sampling):
    """The input of ``agent.decide``."""

    allowed_events: str | list[str] | None = None
    max_retries: int = Field(default=2, ge=0)


class DecisionLogic(RequestLogic):
    """A service that resolves to exactly one legal event and sends it to its machine.

    Made by `create_decision_logic`; give it a name in ``MachineLogic.services`` and invoke that.
    The event is taken like one from outside, before the invoke completes. Where it leads out of
    the state, the invoke is cancelled and ``onDone`` never runs; else ``onDone`` sees the event
    as the output. A decision that fails (``DecisionExhaustedError``, or what the executor raised)
    goes to ``onError``.

    On a bare interpreter guards are not checked before the event is sent, and ``allowed_events``
    has to be declared. `run_agent` and the steps check guards too.

    Example:
        >>> move = create_decision_logic(prompt="Your move.", allowed_events=["ATTACK", "FLEE"])
        >>> move.kind, move.max_retries, [each.type for each in move.request().events]
        ('decision', 2, ['ATTACK', 'FLEE'])
    """

    kind: ClassVar[str] = "decision"

    @property
    def slot(self) -> str:
        """``"decide"``."""
        return "decide"

    @property
    def max_retries(self) -> int:
        """How many further answers are asked for, as far as that is configured."""
        found: int = self._source.fields.get("max_retries", 2)
        return found

    def request(
        self,
        input: Any = None,
        snapshot: Snapshot | None = None,
        *,
        id: str = "decision",
        src: str | None = None,
    ) -> AgentDecisionRequest:
        """The request for an input.

        Args:
            input: The invoke's input.
            snapshot: The live snapshot: candidates are what is allowed of what it accepts, with
                their schemas. Without it they are the allowed events as they are written.
            id: The invoke's id.
            src: The source's name in the chart.

        Raises:
            AgentConfigError: The input does not fit; or there is no snapshot and
                ``allowed_events`` is left out or is a pattern, so that the candidates are
                unknown.
        """
        return self._asked(self._source.read(input), snapshot, id, src)

    def _asked(
        self, settings: Settings, snapshot: Snapshot | None, id: str, src: str | None
    ) -> AgentDecisionRequest:
        allowed = settings.pop("allowed_events", None)
        events = _unseen(allowed) if snapshot is None else _candidates(snapshot, allowed)
        return made_request(AgentDecisionRequest, {**settings, "events": events}, id, src)

    def __call__(self, scope: Any, context: Mapping[str, Any], event: Any) -> Any:
        """Decide; what the runtime calls."""
        executor, binding, invocation = self._called(scope), self._binding, scope.invocation
        settings = self._source.read(invocation.input)
        if not binding.live and settings.get("allowed_events") is None:
            raise AgentConfigError(
                f"source {invocation.src!r}: declare allowed_events; only run_agent and the "
                "steps offer everything that is accepted"
            )
        request = self._asked(settings, scope.snapshot, invocation.id, invocation.src)
        calls = attempts(
            request,
            executor,
            self._info(request),
            can_take=(lambda chosen: can(scope.snapshot, chosen)) if binding.live else None,
            before_call=binding.before_call,
            on_result=binding.on_result,
        )
        return run_calls(calls, binding.signal) if self.is_async else run_calls_sync(calls)

    def step_requests(self, scope: ServiceScope, id: str) -> list[Any]:
        """The request of an invoke that waits for its decision; see the step path."""
        invocation = scope.invocation
        return [self.request(invocation.input, scope.snapshot, id=id, src=invocation.src)]

    def step_result(self, scope: ServiceScope, id: str, data: Any) -> Fed:
        """The event a host brings, checked as if it had just been chosen.

        Raises:
            AgentError: It cannot be taken here; nothing was sent.
        """
        (request,) = self.step_requests(scope, id)
        answer = data if isinstance(data, Mapping) and "event" in data else {"event": data}
        found = judged(request, answer, lambda chosen: can(scope.snapshot, chosen))
        if isinstance(found, DecisionAttempt):
            raise AgentError(f"the decision cannot be taken ({found.failure}): {found.reason}")
        return Fed(event=found)

    def deliver(self, output: ChosenEvent) -> ChosenEvent:
        """The event that the machine takes before the invoke completes."""
        return output

    def _check(self, machine: Machine, settings: Settings) -> None:
        allowed = settings.get("allowed_events")
        if allowed is not None:
            check_allowed(machine, allowed)


def _candidates(snapshot: Snapshot, allowed: AllowedEvents | None) -> list[AgentEventDescriptor]:
    if allowed is not None:
        check_allowed(snapshot.machine, allowed)
    return narrowed(snapshot, allowed)


def _unseen(allowed: AllowedEvents | None) -> list[AgentEventDescriptor]:
    """Candidates of a decision that no machine has been asked about."""
    if allowed is None or any(each.endswith("*") for each in as_patterns(allowed)):
        raise AgentConfigError(
            "the candidates are unknown without a snapshot: pass one, or list the event types"
        )
    names = tool_names(as_patterns(allowed), set())
    return [AgentEventDescriptor(type=each, tool_name=name) for each, name in names.items()]


def create_decision_logic(
    *,
    model: ValueOrFn = None,
    system: ValueOrFn = None,
    prompt: ValueOrFn = None,
    messages: ValueOrFn = None,
    allowed_events: AllowedEvents | Callable[[Any], Sequence[str]] | None = None,
    max_retries: int = 2,
    input: Any = None,
    temperature: ValueOrFn = None,
    max_output_tokens: ValueOrFn = None,
    top_p: ValueOrFn = None,
    top_k: ValueOrFn = None,
    seed: ValueOrFn = None,
    stop_sequences: ValueOrFn = None,
    metadata: ValueOrFn = None,
) -> DecisionLogic:
    """Make a decision that can be reused, tested alone and given a name in a logic.

    Every setting but ``max_retries`` is a value or a function of the invoke's input.

    Args:
        model: The model's name; the executor decides what it means.
        system: The system prompt.
        prompt: What is asked.
        messages: The conversation before the prompt, newest last.
        allowed_events: Event types, ``"*"`` or ``"ns.*"``, one or a list. They narrow what the
            chart accepts and never widen it; None allows all of it.
        max_retries: How many further answers are asked for after one that cannot be taken.
        input: The pydantic type of the input; functions then get it validated.
        temperature: Sampling temperature.
        max_output_tokens: Largest answer, in tokens.
        top_p: Nucleus sampling.
        top_k: Number of candidates for sampling.
        seed: Sampling seed.
        stop_sequences: Texts that end the answer.
        metadata: The host's own.

    Returns:
        A `DecisionLogic` without an executor: `run_agent` binds ``decide=``, and
        ``with_executor`` gives it one of its own.

    Raises:
        AgentConfigError: A setting is of the wrong type. Names of ``allowed_events`` are checked
            when a machine is built with it (``ChartError``).

    Source: the design of statelyai/agent 2, createDecisionLogic.

    Example:
        >>> from guardchart import MachineLogic, SyncInterpreter, create_machine
        >>> move = create_decision_logic(prompt=lambda input: f"You have {input['hp']} hp.",
        ...                              allowed_events=["ATTACK", "FLEE"])
        >>> move.request({"hp": 3}).prompt
        'You have 3 hp.'
        >>> chart = {"id": "game", "initial": "choosing", "states": {
        ...     "choosing": {"invoke": {"src": "move", "input": {"hp": 3}},
        ...                  "on": {"ATTACK": "fight", "FLEE": "safe"}},
        ...     "fight": {}, "safe": {}}}
        >>> decided = move.with_executor(lambda request: {"event": {"type": "FLEE"}})
        >>> game = create_machine(chart, MachineLogic(services={"move": decided}))
        >>> sorted(SyncInterpreter(game).start().current_state_ids)
        ['game.safe']
    """
    if type(max_retries) is not int or max_retries < 0:
        raise AgentConfigError("create_decision_logic: max_retries must be an int of at least 0")
    if allowed_events is not None and not callable(allowed_events):
        allowed_events = as_patterns(allowed_events)
    fields = {
        "model": model,
        "system": system,
        "prompt": prompt,
        "messages": messages,
        "allowed_events": allowed_events,
        "max_retries": max_retries,
        "temperature": temperature,
        "max_output_tokens": max_output_tokens,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop_sequences": stop_sequences,
        "metadata": metadata,
    }
    return DecisionLogic(Configured("create_decision_logic", fields, input))


def decide_source() -> DecisionLogic:
    """The logic of ``agent.decide``: everything comes with the invoke's input."""
    return DecisionLogic(FromInput("agent.decide", DecideInput))
