"""The reference monitor, exhaustively: which check answers, and that it is pure."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator

from guardchart.errors import ToolDeniedError
from guardchart.gate import (
    DEFAULT_MAX_TOOL_CALLS,
    MISMATCH,
    NEEDS_APPROVAL,
    NOT_ALLOWED,
    Allowed,
    Checked,
    Facts,
    Rule,
    ToolCall,
    check,
    digest,
    tool,
    tool_registry,
)

entered: list[str] = []
validated: list[int] = []


def read(q: str) -> str:
    entered.append("read")
    return q


def pay(amount: int, currency: str = "EUR") -> str:
    entered.append("pay")
    return currency


def noted(number: int) -> int:
    validated.append(number)
    return number


def order(number: Annotated[int, AfterValidator(noted)]) -> str:
    return str(number)


REGISTRY = tool_registry(read, tool(pay, side_effect=True))
GOOD = ToolCall("c1", "pay", {"amount": 5})
DIGEST = digest({"amount": 5, "currency": "EUR"})


def row(**changes: Any) -> Any:
    values = {"status": "approved", "digest": DIGEST, "use_by": 1000, "tool": "pay"} | changes
    slot = SimpleNamespace(tool=values.pop("tool"))
    return SimpleNamespace(slot=slot, **values)


FACTS = Facts(REGISTRY, Allowed(frozenset({"pay", "read"})), row=row(), now=500)

# Each fault names the check that must answer when it is the first one that fails.
FAULTS: list[tuple[str, int, dict[str, Any], dict[str, Any], str]] = [
    ("unregistered", 1, {"name": "delete_all"}, {}, NOT_ALLOWED),
    ("not allowed", 2, {}, {"allowed": Allowed(frozenset({"read"}))}, NOT_ALLOWED),
    ("too many calls", 3, {}, {"turn_size": 9}, "9 tool calls in one turn (max_tool_calls=8)"),
    ("spent id", 3, {}, {"spent_ids": frozenset({"c1"})}, "duplicate tool call ids"),
    ("bad arguments", 4, {"arguments": {"amount": "5"}}, {}, "invalid arguments (amount: "),
    ("no row", 6, {}, {"row": None}, NEEDS_APPROVAL),
    ("not approved", 6, {}, {"row": row(status="proposed")}, NEEDS_APPROVAL),
    ("too late", 6, {}, {"row": row(use_by=400)}, "expired"),
    ("other digest", 6, {}, {"row": row(digest="0" * 64)}, MISMATCH),
    ("other tool", 6, {}, {"row": row(tool="read")}, MISMATCH),
]


def test_a_good_call_passes_with_its_defaults_filled_in() -> None:
    checked = check(GOOD, FACTS)
    assert isinstance(checked, Checked)
    assert checked.arguments == {"amount": 5, "currency": "EUR"}
    assert checked.digest == DIGEST
    assert checked.needs_row
    assert checked.needs_approval


@pytest.mark.parametrize("fault", FAULTS, ids=[f[0] for f in FAULTS])
def test_each_fault_alone_is_refused_by_its_check(fault: Any) -> None:
    _, _, call, facts, reason = fault
    with pytest.raises(ToolDeniedError) as caught:
        check(replace(GOOD, **call), FACTS._replace(**facts))
    assert reason in caught.value.reason


def test_of_any_two_faults_the_earlier_check_answers() -> None:
    for first, second in itertools.combinations(FAULTS, 2):
        if first[1] == second[1] or set(first[3]) & set(second[3]):
            continue
        call = replace(GOOD, **{**second[2], **first[2]})
        with pytest.raises(ToolDeniedError) as caught:
            check(call, FACTS._replace(**first[3], **second[3]))
        assert first[4] in caught.value.reason, (first[0], second[0])


@pytest.mark.parametrize(
    "status",
    [
        "proposed",
        "rejected",
        "edited",
        "void",
        "expired",
        "claimed",
        "done",
        "failed",
        "",
        "Approved",
    ],
)
def test_only_an_approved_row_counts(status: str) -> None:
    with pytest.raises(ToolDeniedError, match="needs human approval"):
        check(GOOD, FACTS._replace(row=row(status=status)))


def test_an_approval_is_good_until_and_with_its_last_millisecond() -> None:
    assert check(GOOD, FACTS._replace(now=1000))
    with pytest.raises(ToolDeniedError, match="expired"):
        check(GOOD, FACTS._replace(now=1001))
    assert check(GOOD, FACTS._replace(row=row(use_by=None), now=10**15))


def test_before_anybody_is_asked_the_approval_is_only_announced() -> None:
    checked = check(GOOD, FACTS._replace(row=None, proposing=True))
    assert checked.needs_approval
    with pytest.raises(ToolDeniedError, match="invalid arguments"):
        check(replace(GOOD, arguments={}), FACTS._replace(row=None, proposing=True))


def test_a_second_look_at_the_same_call_judges_all_but_the_arguments_anew() -> None:
    validated.clear()
    registry = tool_registry(tool(order, requires_approval=True))
    call = ToolCall("c1", "order", {"number": 7})
    facts = FACTS._replace(registry=registry, allowed=Allowed(everything=True), proposing=True)
    first = check(call, facts)
    assert check(call, facts, first) == first
    assert validated == [7]
    for later in ({"allowed": Allowed()}, {"proposing": False}, {"spent_ids": {"c1"}}):
        with pytest.raises(ToolDeniedError):
            check(call, facts._replace(**later), first)
    same = tool_registry(tool(order, requires_approval=True))
    check(call, facts._replace(registry=same), first)
    check(replace(call, arguments={"number": 8}), facts, first)
    assert validated == [7, 7, 8]


def test_a_read_only_tool_needs_neither_row_nor_approval() -> None:
    checked = check(ToolCall("c2", "read", {"q": "x"}), FACTS._replace(row=None))
    assert not checked.needs_row
    assert not checked.needs_approval


def test_a_rule_may_ask_for_a_reader_and_spare_a_writer() -> None:
    rules = {"read": Rule("always"), "pay": Rule("never")}
    facts = FACTS._replace(allowed=Allowed(everything=True, rules=rules), proposing=True)
    reader = check(ToolCall("c2", "read", {"q": "x"}), facts)
    assert (reader.needs_row, reader.needs_approval) == (True, True)
    writer = check(GOOD, facts)
    assert (writer.needs_row, writer.needs_approval) == (True, False)
    with pytest.raises(ToolDeniedError, match="needs human approval"):
        check(GOOD, facts._replace(proposing=False, row=None))


def test_a_tool_may_ask_though_it_changes_nothing() -> None:
    registry = tool_registry(tool(read, requires_approval=True))
    checked = check(
        ToolCall("1", "read", {"q": ""}), Facts(registry, Allowed(everything=True), proposing=True)
    )
    assert checked.needs_approval


def test_a_hidden_and_a_missing_tool_are_answered_alike() -> None:
    texts = set()
    for name in ("pay", "nope"):
        with pytest.raises(ToolDeniedError) as caught:
            check(ToolCall("c1", name, {}), FACTS._replace(allowed=Allowed(frozenset({"read"}))))
        texts.add(str(caught.value).replace(name, "X"))
    assert len(texts) == 1


NAMES = [
    "рay",
    "PAY",
    "pay ",
    " pay",
    "pay\n",
    "pa\u200by",
    "ｐay",
    "pay\x00",
    "p" * 10_000,
    "",
    "*",
    1,
    None,
    ["pay"],
    "p\u0430y",
    "pay\u202e",
]


@pytest.mark.parametrize("name", NAMES, ids=[repr(n)[:20] for n in NAMES])
def test_a_look_alike_is_unregistered_even_where_everything_is_allowed(name: Any) -> None:
    with pytest.raises(ToolDeniedError) as caught:
        check(ToolCall("c1", name, {"amount": 5}), FACTS._replace(allowed=Allowed(everything=True)))
    assert caught.value.reason == NOT_ALLOWED
    assert len(str(caught.value)) < 150
    assert str(caught.value).isascii()


IDS = ["", None, 1, True, b"c1", "a\x00", "a\n", "a\u200b", "a\u202e", "\ud800", "x" * 257, ["c1"]]


@pytest.mark.parametrize("ident", IDS, ids=[repr(i)[:20] for i in IDS])
def test_an_id_that_is_not_printable_text_is_malformed(ident: Any) -> None:
    with pytest.raises(ToolDeniedError, match="malformed tool call id"):
        check(replace(GOOD, id=ident), FACTS)


def test_the_limit_of_a_turn_is_eight() -> None:
    assert DEFAULT_MAX_TOOL_CALLS == 8
    assert check(GOOD, FACTS._replace(turn_size=8))
    with pytest.raises(ToolDeniedError, match="max_tool_calls=2"):
        check(GOOD, FACTS._replace(turn_size=3, max_tool_calls=2))


def test_check_changes_nothing_and_runs_no_tool() -> None:
    entered.clear()
    call = ToolCall("c1", "pay", {"amount": 5})
    for _ in range(3):
        assert check(call, FACTS) == check(call, FACTS)
    assert call.arguments == {"amount": 5}
    assert entered == []


def test_what_is_returned_shares_nothing_with_the_call() -> None:
    def keep(tags: list[str]) -> str:
        return ""

    call = ToolCall("1", "keep", {"tags": ["a"]})
    checked = check(call, Facts(tool_registry(keep), Allowed(everything=True)))
    call.arguments["tags"].append("b")
    assert checked.arguments == {"tags": ["a"]}
    assert checked.text == '{"tags":["a"]}'


@pytest.mark.needs_src
def test_the_monitor_fits_on_one_screen() -> None:
    lines = inspect.getsource(check).split('"""')[-1].strip().splitlines()
    assert len(lines) <= 60
