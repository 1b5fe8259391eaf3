"""``ledger_for``: the ledger that belongs beside a LangGraph checkpointer."""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import TYPE_CHECKING, Any

from guardchart.errors import AgentConfigError
from guardchart.persistence import InMemoryLedger, SQLiteLedger

if TYPE_CHECKING:
    from guardchart.persistence import Ledger

__all__ = ["DeferredLedger", "ledger_for"]

_FILE = "pragma database_list"

_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def ledger_for(checkpointer: Any) -> Ledger:
    """Return the ledger that lives as long, and in the same place, as a checkpointer.

    Args:
        checkpointer: LangGraph's ``InMemorySaver``, ``SqliteSaver`` or ``AsyncSqliteSaver``.

    Returns:
        For an in-memory saver, or a SQLite one on an in-memory database, an
        ``InMemoryLedger``. For a SQLite file a ``SQLiteLedger`` on a connection of its own to
        that file, its table beside the checkpoints. An ``AsyncSqliteSaver`` need not be open
        yet: its file is looked up when the ledger is first used. The same saver always gets
        the same ledger, which does not keep the saver alive.

    Raises:
        AgentConfigError: No ledger can be derived from this object; the message says what to
            pass instead. Nothing was opened.

    Example:
        >>> from langgraph.checkpoint.memory import InMemorySaver
        >>> saver = InMemorySaver()
        >>> ledger_for(saver) is ledger_for(saver)
        True
    """
    with _lock:
        try:
            ledger = _known.get(checkpointer)
        except TypeError:  # not hashable, or takes no weak references: no saver we know
            raise _unknown(checkpointer) from None
        if ledger is None:
            ledger = _make(checkpointer)
            _known[checkpointer] = ledger
        return ledger  # type: ignore[no-any-return]


def _make(checkpointer: Any) -> Any:
    # By name along the ancestry, so that no saver is imported to ask.
    names = {f"{each.__module__}.{each.__qualname__}" for each in type(checkpointer).__mro__}
    if "langgraph.checkpoint.memory.InMemorySaver" in names:
        return InMemoryLedger()
    if "langgraph.checkpoint.sqlite.SqliteSaver" in names:
        with checkpointer.cursor(transaction=False) as cursor:
            return _open(cursor.execute(_FILE).fetchall())
    if "langgraph.checkpoint.sqlite.aio.AsyncSqliteSaver" in names:
        return DeferredLedger(checkpointer)
    raise _unknown(checkpointer)


def _open(databases: list[Any]) -> Any:
    """The ledger for ``pragma database_list``: rows of number, name and file."""
    file = next((row[2] for row in databases if row[1] == "main"), None)
    return SQLiteLedger(file) if file else InMemoryLedger()


def _unknown(checkpointer: Any) -> AgentConfigError:
    kind = "a class" if isinstance(checkpointer, type) else f"a {type(checkpointer).__name__}"
    hint = "a Ledger of your own, e.g. SQLiteLedger(path), as ledger="
    if "postgres" in f"{type(checkpointer).__module__}.{type(checkpointer).__name__}".lower():
        # A psycopg connection does not give its password back, so nothing can be derived here.
        hint = "a Ledger of your own on that database, or SQLiteLedger(path), as ledger="
    elif checkpointer is None or isinstance(checkpointer, bool):
        kind = "no checkpointer"
        hint = "the saver itself, the one given to compile(checkpointer=...)"
    return AgentConfigError(f"ledger_for: cannot derive a ledger from {kind}; pass {hint}")


class DeferredLedger:
    """The ledger beside an ``AsyncSqliteSaver``, found when it is first needed.

    Every attribute is the real ledger's. ``aresolve`` finds it from the saver's event loop,
    which `statechart_node` awaits; any other thread may simply use a verb.
    """

    def __init__(self, saver: Any) -> None:
        self._saver = weakref.ref(saver)
        self._ledger: Any = None

    @property
    def resolved(self) -> bool:
        """Whether the real ledger is known already."""
        return self._ledger is not None

    async def aresolve(self) -> Any:
        """Return the real ledger; await it on the saver's own event loop, or any other."""
        if self._ledger is None:
            saver = self._alive()
            if asyncio.get_running_loop() is saver.loop:
                rows = await _databases(saver)
            else:
                _check_running(saver)
                future = asyncio.run_coroutine_threadsafe(_databases(saver), saver.loop)
                rows = await asyncio.wrap_future(future)
            self._keep(rows)
        return self._ledger

    def resolve(self) -> Any:
        """Return the real ledger, from any thread but the one the saver's loop runs on.

        Raises:
            AgentConfigError: Called on that very thread, which would wait for itself; or the
                saver is gone, or its loop does not run.
        """
        if self._ledger is None:
            saver = self._alive()
            try:
                here = asyncio.get_running_loop() is saver.loop
            except RuntimeError:
                here = False
            if here:
                raise AgentConfigError(
                    "ledger_for: the ledger of an AsyncSqliteSaver was first used inside its own "
                    "event loop; run the graph with ainvoke, or `await ledger.aresolve()` once"
                )
            _check_running(saver)
            self._keep(asyncio.run_coroutine_threadsafe(_databases(saver), saver.loop).result())
        return self._ledger

    def _keep(self, rows: list[Any]) -> None:
        with _lock:
            if self._ledger is None:
                self._ledger = _open(rows)

    def _alive(self) -> Any:
        saver = self._saver()
        if saver is None:
            raise AgentConfigError("ledger_for: the checkpointer no longer exists")
        return saver

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.resolve(), name)


def _check_running(saver: Any) -> None:
    if not saver.loop.is_running():  # whatever is handed to it would wait for ever
        raise AgentConfigError(
            "ledger_for: the event loop of the AsyncSqliteSaver does not run; "
            "use the ledger while the saver is open"
        )


async def _databases(saver: Any) -> list[Any]:
    await saver.setup()
    async with saver.conn.execute(_FILE) as cursor:
        return list(await cursor.fetchall())
