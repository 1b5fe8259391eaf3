"""The protocol keeps its promises in every interleaving; each rule left out breaks one."""

from __future__ import annotations

import pytest

from tests.protocol import conversation, deciders
from tests.protocol.conversation import Conversation
from tests.protocol.deciders import Deciders
from tests.protocol.explore import explore
from tests.protocol.paper import Rules

BATCH = Rules(adopt="batch")

SMALL = {
    "two workers, a fork, a model that answers anew": Conversation(acts=1),
    "a crash anywhere": Conversation(acts=1, crashes=1),
    "two lives of a machine": Conversation(acts=1, resets=1, forks=0),
    "state edited": Conversation(births=1, edits=1),
    "state edited, rows in memory": Conversation(births=1, edits=1, rules=BATCH),
    "in doubt, resolved by a person": Conversation(births=1, acts=1, crashes=1, resolves=1),
    "a slow claimant, resolved by a person": Conversation(births=1, resolves=1),
    "not sent, released, the release repeated": Conversation(
        births=1, acts=1, deliveries=3, unsent=1, crashes=1
    ),
    "new input": Conversation(acts=1, inputs=1, forks=0, crashes=1),
    "approved by policy, retried": Conversation(acts=0, crashes=1, policy=True, fresh_ids=True),
    "several decide": Deciders(),
    "several decide, by id alone": Deciders(kinds=("approve by id", "edit", "reject")),
    "several decide, on purpose again": Deciders(again=("approve", "edit")),
    "several decide, bodies raise": Deciders(failing=True, crashes=2),
}

LARGE = {
    "two workers, a fork, two approvals": Conversation(),
    "two workers, a fork, a crash": Conversation(crashes=1),
    "three births, one worker": Conversation(births=3, acts=3, forks=2, crashes=1, workers=1),
    "two lives and a fork": Conversation(resets=1, crashes=1, acts=1),
    "two lives, two approvals": Conversation(resets=1),
    "state edited between two births": Conversation(edits=1),
    "state edited, rows in memory, two births": Conversation(edits=1, acts=1, rules=BATCH),
    "new input and a fork back": Conversation(inputs=1, crashes=1),
    "everything at once, one worker": Conversation(
        crashes=1, edits=1, resets=1, inputs=1, resolves=1, unsent=1, workers=1
    ),
    "three decide": Deciders(runs=3, crashes=0),
    "three decide, on purpose again": Deciders(
        runs=3, crashes=0, kinds=("approve", "edit"), again=("approve",)
    ),
    "three decide, bodies raise, crashes": Deciders(
        runs=3, kinds=("approve", "reject", "edit"), failing=True
    ),
}


@pytest.mark.parametrize("model", SMALL.values(), ids=SMALL)
def test_no_interleaving_breaks_a_promise(model):
    explored = explore(model, limit=200_000)
    assert explored.broken == {}
    assert explored.complete


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", LARGE.values(), ids=LARGE)
def test_no_interleaving_breaks_a_promise_within_larger_bounds(model):
    explored = explore(model, limit=4_000_000)
    assert explored.broken == {}
    assert explored.complete


def weakened(**rules):
    return Rules(**rules)


CONTROLS = {
    "ids as identity": (
        Conversation(rules=weakened(slot_identity=False)),
        conversation.STRANDED,
    ),
    "ids as identity, approved by policy": (
        Conversation(
            acts=0, crashes=1, policy=True, fresh_ids=True, rules=weakened(slot_identity=False)
        ),
        conversation.TWICE,
    ),
    "no run nonce": (
        Conversation(acts=1, resets=1, forks=0, rules=weakened(run_nonce=False)),
        conversation.UNTRUE,
    ),
    "parked before proposed": (
        Conversation(births=1, crashes=1, rules=weakened(propose_first=False)),
        conversation.STRANDED,
    ),
    "a claim that does not compare": (
        Conversation(births=1, rules=weakened(claim_compares=False)),
        conversation.TWICE,
    ),
    "no token check": (
        Conversation(births=1, acts=1, deliveries=3, unsent=1, rules=weakened(tokens=False)),
        conversation.TWICE,
    ),
    "in doubt resolved to claimable": (
        Conversation(
            births=1, acts=1, crashes=1, resolves=1, rules=weakened(resolve_settles=False)
        ),
        conversation.TWICE,
    ),
    "a mismatch stays parked": (
        Conversation(births=1, edits=1, rules=weakened(mismatch_ends=False)),
        conversation.STRANDED,
    ),
    "in memory, unseen calls taken over one by one": (
        Conversation(births=1, edits=1, rules=weakened(adopt="call")),
        conversation.TWICE,
    ),
    "closed rows reopened by a plain approval": (
        Conversation(acts=1, inputs=1, rules=weakened(closed_needs_again=False)),
        conversation.UNTRUE,
    ),
    "the chart moves before the ledger decides": (
        Deciders(rules=weakened(decide_first=False)),
        deciders.UNTRUE,
    ),
    "edits in place": (
        Deciders(kinds=("approve by id", "edit"), rules=weakened(edit_makes_child=False)),
        deciders.TAKEN,
    ),
    "edits not followed": (Deciders(rules=weakened(follow_edits=False)), deciders.UNTRUE),
    "closed rows reopened, several decide": (
        Deciders(rules=weakened(closed_needs_again=False)),
        deciders.UNTRUE,
    ),
    "a claim that does not compare, several decide": (
        Deciders(rules=weakened(claim_compares=False)),
        deciders.TWICE,
    ),
}


@pytest.mark.parametrize(("model", "promise"), CONTROLS.values(), ids=CONTROLS)
def test_a_protocol_with_one_rule_left_out_breaks_a_promise(model, promise):
    explored = explore(model, limit=100_000, first_only=True)
    assert promise in explored.broken


def test_every_rule_has_a_control():
    left_out = set()
    for model, _ in CONTROLS.values():
        given = Rules()
        left_out |= {name for name in vars(given) if vars(model.rules)[name] != vars(given)[name]}
    assert left_out == set(vars(Rules()))


LIMITS = {
    "memory lost in a restart, then a fork": (
        Conversation(births=1, acts=1, restarts=1, rules=BATCH),
        conversation.TWICE,
    ),
    "approvals by id alone while somebody edits state": (
        Conversation(births=1, edits=1, digests=False),
        conversation.NOT_SHOWN,
    ),
}


@pytest.mark.parametrize(("model", "promise"), LIMITS.values(), ids=LIMITS)
def test_a_documented_limit_is_one(model, promise):
    assert promise in explore(model, limit=100_000, first_only=True).broken


def test_a_changed_call_approved_on_a_fork_can_run():
    class Watched(Conversation):
        def at_rest(self, state):
            slots = {entry.slot for entry in state.entries}
            return "both ran" if len(slots) == 2 else super().at_rest(state)

    explored = explore(Watched(), limit=100_000, first_only=True)
    assert set(explored.broken) == {"both ran"}
