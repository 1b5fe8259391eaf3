"""``ledger_for``: the ledger that belongs beside a LangGraph checkpointer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from guardchart.errors import AgentConfigError, StoreError
from guardchart.persistence import InMemoryLedger, SQLiteLedger

if TYPE_CHECKING:
    from guardchart.persistence import Ledger

__all__ = ["DeferredLedger", "ledger_for"]

_FILE: Final = "pragma database_list"

# The schema in which the checkpoints are, or will be once `setup` has run.
_SCHEMA: Final = (
    "SELECT coalesce((SELECT nspname FROM pg_class JOIN pg_namespace ON relnamespace = "
    "pg_namespace.oid WHERE pg_class.oid = to_regclass('checkpoints')), current_schema())::text"
)

_SYNC_POSTGRES: Final = frozenset(
    {
        "langgraph.checkpoint.postgres.PostgresSaver",
        "langgraph.checkpoint.postgres.shallow.ShallowPostgresSaver",
    }
)
_ASYNC_POSTGRES: Final = frozenset(
    {
        "langgraph.checkpoint.postgres.aio.AsyncPostgresSaver",
        "langgraph.checkpoint.postgres.shallow.AsyncShallowPostgresSaver",
    }
)

_INSTEAD: Final = "or pass PostgresLedger(dsn) as ledger="

_Maker: TypeAlias = Callable[[], Any]
"""Opens the ledger that was found; may block."""

_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def ledger_for(checkpointer: Any) -> Ledger:
    """Return the ledger that lives as long, and in the same place, as a checkpointer.

    Args:
        checkpointer: LangGraph's ``InMemorySaver``, ``SqliteSaver``, ``AsyncSqliteSaver``,
            ``PostgresSaver`` or ``AsyncPostgresSaver``, whether it holds a connection, one in
            pipeline mode, or a pool.

    Returns:
        For an in-memory saver, or a SQLite one on an in-memory database, an
        ``InMemoryLedger``. For a SQLite file a ``SQLiteLedger``, for PostgreSQL a
        ``PostgresLedger``, on connections of its own to the same database, its table beside
        the checkpoints. An async saver's database is looked up when the ledger is first used.
        The same saver always gets the same ledger, which does not keep the saver alive.

    Raises:
        AgentConfigError: No ledger can be derived from this object, or its database cannot be
            reached as it reaches it; the message says what to pass instead. Nothing was
            written.

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
            return _beside_file(cursor.execute(_FILE).fetchall())()
    if names & _SYNC_POSTGRES:
        return _beside_tables(checkpointer)()
    if "langgraph.checkpoint.sqlite.aio.AsyncSqliteSaver" in names:
        return DeferredLedger(checkpointer, _beside_file_async)
    if names & _ASYNC_POSTGRES:
        return DeferredLedger(checkpointer, _beside_tables_async)
    raise _unknown(checkpointer)


def _unknown(checkpointer: Any) -> AgentConfigError:
    kind = "a class" if isinstance(checkpointer, type) else f"a {type(checkpointer).__name__}"
    hint = "a Ledger of your own, e.g. SQLiteLedger(path) or PostgresLedger(dsn), as ledger="
    if checkpointer is None or isinstance(checkpointer, bool):
        kind = "no checkpointer"
        hint = "the saver itself, the one given to compile(checkpointer=...)"
    return AgentConfigError(f"ledger_for: cannot derive a ledger from {kind}; pass {hint}")


# SQLite


def _beside_file(databases: list[Any]) -> _Maker:
    """The ledger for ``pragma database_list``: rows of number, name and file."""
    file = next((row[2] for row in databases if row[1] == "main"), None)
    return functools.partial(SQLiteLedger, file) if file else InMemoryLedger


async def _beside_file_async(saver: Any) -> _Maker:
    await saver.setup()
    async with saver.conn.execute(_FILE) as cursor:
        return _beside_file(list(await cursor.fetchall()))


# PostgreSQL. The saver's own connection says how it was made, password included, and sees the
# schema that its `search_path` leads to, whoever set it. A pool is asked through one of its
# connections, since its arguments may be functions.


def _beside_tables(saver: Any) -> _Maker:
    with contextlib.ExitStack() as stack, _reaching(saver):
        stack.enter_context(saver.lock)
        connection = saver.conn
        if not hasattr(connection, "execute"):
            connection = stack.enter_context(connection.connection())
        found = connection.execute(_SCHEMA).fetchone()
        if saver.pipe is not None:  # or the question's transaction stays open
            saver.pipe.sync()
        return _like(connection, found)


async def _beside_tables_async(saver: Any) -> _Maker:
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(_reaching(saver))
        await stack.enter_async_context(saver.lock)
        connection = saver.conn
        if not hasattr(connection, "execute"):
            connection = await stack.enter_async_context(connection.connection())
        cursor = await connection.execute(_SCHEMA)
        found = await cursor.fetchone()
        if saver.pipe is not None:
            await saver.pipe.sync()
        return _like(connection, found)


def _like(connection: Any, found: Any) -> _Maker:
    # The saver has brought psycopg along.
    from guardchart.persistence._postgres import like
    from guardchart.persistence._postgres_ledger import PostgresLedger

    connect = like(connection)
    (schema,) = found.values() if isinstance(found, dict) else found

    def make() -> Any:
        try:
            return PostgresLedger(connect, schema=schema)
        except StoreError as error:
            raise AgentConfigError(f"ledger_for: {error}; {_INSTEAD}") from error

    return make


@contextlib.contextmanager
def _reaching(saver: Any) -> Any:
    try:
        yield
    except Exception as error:
        raise AgentConfigError(
            f"ledger_for: the {type(saver).__name__}'s database does not answer "
            f"({type(error).__name__}); use it while the saver is open; {_INSTEAD}"
        ) from error


class DeferredLedger:
    """The ledger beside an async saver, found when it is first needed.

    Every attribute is the real ledger's. ``aresolve`` finds it from the saver's event loop,
    which `statechart_node` awaits; any other thread may simply use a verb.
    """

    def __init__(self, saver: Any, find: Callable[[Any], Any]) -> None:
        self._saver = weakref.ref(saver)
        self._kind = type(saver).__name__
        self._find = find
        self._making = threading.Lock()
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
                maker = await self._find(saver)
            else:
                self._check_running(saver)
                future = asyncio.run_coroutine_threadsafe(self._find(saver), saver.loop)
                maker = await asyncio.wrap_future(future)
            del saver
            await asyncio.to_thread(self._keep, maker)
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
                    f"ledger_for: the ledger of an {self._kind} was first used inside its own "
                    "event loop; run the graph with ainvoke, or `await ledger.aresolve()` once"
                )
            self._check_running(saver)
            self._keep(asyncio.run_coroutine_threadsafe(self._find(saver), saver.loop).result())
        return self._ledger

    def _keep(self, maker: _Maker) -> None:
        with self._making:
            if self._ledger is None:
                self._ledger = maker()

    def _check_running(self, saver: Any) -> None:
        if not saver.loop.is_running():  # whatever is handed to it would wait for ever
            raise AgentConfigError(
                f"ledger_for: the event loop of the {self._kind} does not run; "
                "use the ledger while the saver is open"
            )

    def _alive(self) -> Any:
        saver = self._saver()
        if saver is None:
            raise AgentConfigError("ledger_for: the checkpointer no longer exists")
        return saver

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.resolve(), name)
