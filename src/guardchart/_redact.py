"""Redaction: secrets are taken out of what a model, a snapshot, a trace or a log may see.

By key, on whole words (`access_token`, `x-api-key`, `clientSecret`; not `next_page_token`,
`tokens_used`, `cookie_policy`), and by value, on the shapes that providers give their secrets.
Redaction is for display and storage of outputs; it never changes what runs. It cannot know every
secret: credentials belong in a tool's closure, where no model sees them.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import itertools
import json
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

__all__ = ["AGENT_REDACT_KEYS", "MASK", "error_text", "scrub", "scrub_text"]

MASK = "***"

AGENT_REDACT_KEYS: tuple[str, ...] = (
    "access_key",
    "api_key",
    "apikey",
    "auth",
    "authorisation",
    "authorization",
    "bearer",
    "client_secret",
    "connection_string",
    "cookie",
    "cookies",
    "credential",
    "credentials",
    "passphrase",
    "passwd",
    "password",
    "passwords",
    "private_key",
    "pwd",
    "secret",
    "secret_key",
    "secrets",
    "session_key",
    "signing_key",
    "token",
)
"""Names, as words joined by ``_``, whose values are redacted wherever they end a key."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Words that, after a secret's name, say that the value is about it and not it.
_ABOUT_TEXT = """
    budget bytes chars consent cost count counts duration enabled endpoint exists expired expires
    expiration expiry format kind len length lifetime limit limits max method min mode name page
    policies policy preference preferences present provided ratio required rotated rotation
    scheme scope scopes size status strength ttl type uri url usage used valid version window at
    in on per
"""
# Words that, before `token`, make it a place in a list or a unit of text.
_PLACE_TEXT = """
    bos completion continuation cursor end eos first input last max mask min next num output pad
    page pagination per prev previous prompt resume sep special start stop sync unk
"""
_ABOUT = frozenset(_ABOUT_TEXT.split())
_PLACE = frozenset(_PLACE_TEXT.split())
_KEYS = tuple(tuple(name.split("_")) for name in AGENT_REDACT_KEYS)
_BY_LAST: dict[str, tuple[tuple[str, ...], ...]] = {
    last: tuple(k for k in _KEYS if k[-1] == last) for last in {k[-1] for k in _KEYS}
}


def _is_secret_key(key: str) -> bool:
    """Whether a key, read as words, names a secret."""
    words = [word.lower() for word in _WORD.findall(key[:200])]
    for at, word in enumerate(words):
        for name in _BY_LAST.get(word, ()):
            start = at + 1 - len(name)
            if start < 0 or tuple(words[start : at + 1]) != name:
                continue
            if at + 1 < len(words) and words[at + 1] in _ABOUT:
                continue
            if word == "token" and start > 0 and words[start - 1] in _PLACE:
                continue
            return True
    return False


_KEY_CACHE: dict[str, bool] = {}


def _secret_key(key: str) -> bool:
    known = _KEY_CACHE.get(key)
    if known is None:
        known = _is_secret_key(key)
        if len(key) <= 64 and len(_KEY_CACHE) < 4096:
            _KEY_CACHE[key] = known
    return known


# Each pattern is linear: bounded repeats, no nested ones.
_SHAPES = (
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----(?:(?!-----END)[\s\S]){0,20000}"
    r"(?:-----END [A-Z0-9 ]{0,40}-----)?",
    r"(?i:\b(?:bearer|basic)[ \t]+)(?=[A-Za-z0-9._~+/-]{0,200}[0-9._~+/-])[A-Za-z0-9._~+/-]{8,}=*",
    r"\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*)?",
    r"\bsk[-_](?=[A-Za-z0-9_-]{0,200}[0-9])[A-Za-z0-9_-]{12,}",
    r"\b(?:rk|pk|whsec)_(?:live_|test_)?(?=[A-Za-z0-9]{0,100}[0-9])[A-Za-z0-9]{16,}",
    r"\b(?:AKIA|ASIA|AGPA|AIDA|AROA)[A-Z0-9]{16}\b",
    r"\bgh[opusr]_[A-Za-z0-9]{16,}",
    r"\bgithub_pat_[A-Za-z0-9_]{20,}",
    r"\bglpat-[A-Za-z0-9_-]{16,}",
    r"\bxox[abeoprs]-[A-Za-z0-9-]{8,}",
    r"\bxapp-[A-Za-z0-9-]{8,}",
    r"\bAIza[A-Za-z0-9_-]{30,}",
    r"\bya29\.[A-Za-z0-9_-]{16,}",
    r"\bGOCSPX-[A-Za-z0-9_-]{16,}",
    r"\bhf_[A-Za-z0-9]{24,}",
    r"\bnpm_[A-Za-z0-9]{30,}",
    r"\bpypi-[A-Za-z0-9_-]{40,}",
    r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    r"\bdop_v1_[a-f0-9]{40,}",
    r"https://hooks\.slack\.com/services/[A-Za-z0-9/]{20,}",
)
_VALUES = re.compile("|".join(f"(?:{shape})" for shape in _SHAPES))
# Each way begins with a letter of its own, by which the search skips what cannot begin any.
_HINT = re.compile(
    r"-----BEGIN|eyJ|sk[-_]|rk_|pk_|whsec_|A(?:KIA|SIA|GPA|IDA|ROA)|gh[opusr]_|github_pat_|glpat-"
    r"|xox|xapp-|AIza|ya29|GOCSPX|hf_|npm_|pypi-|SG\.|dop_v1_|slack|b(?i:earer|asic)|B(?i:earer|asic)"
)
_SHORTEST = 13
"""No shape is shorter."""
_USERINFO = re.compile(r"(?<=://)([^\s/:@]{0,200}):([^\s/@]{1,200})@")
# `password=hunter2`, `"api_key": "..."`, `Authorization: ...` in running text: a name, a sign, and
# what stands there. Only a secret's value is consumed, so `error: token=x` is seen too.
_NAMED = re.compile(
    r"""(?<![A-Za-z0-9_.-])[A-Za-z][A-Za-z0-9_.-]{1,200}+"""
    r"""(?=(\\{0,8}["']?\s{0,4}(?:=>|[=:])\s{0,4}))"""
)
_GIVEN = re.compile(
    r"""(?P<q>\\{1,8}["'])[^"'\n]*["']?|(?P<d>")(?:[^"\\\n]|\\.)*"?|(?P<s>')[^'\n]*'?"""
    r"""|[^\s"',;&)\]}]+"""
)
_LITERAL = frozenset({"null", "true", "false", "None", "True", "False", MASK})


def _mask_assigned(text: str) -> str:
    out: list[str] = []
    at = 0
    for match in _NAMED.finditer(text):
        if match.start() < at or not _secret_key(match[0]):
            continue
        begin = match.end(1)
        given = _GIVEN.match(text, begin)
        # JSON literals and marks already made are left, so that text stays readable and stable.
        if given is None or given[0] in _LITERAL:
            continue
        quote = given["q"] or given["d"] or given["s"] or ""
        out += (text[at:begin], quote, MASK, quote)
        at = given.end()
    return "".join((*out, text[at:])) if out else text


def scrub_text(text: str, *, by_key: bool = True) -> str:
    """Mask what looks like a secret in running text."""
    if len(text) >= _SHORTEST and _HINT.search(text):
        text = _VALUES.sub(MASK, text)
    if "://" in text:
        text = _USERINFO.sub(lambda m: f"{MASK}:{MASK}@", text)
    if by_key and ("=" in text or ":" in text):
        text = _mask_assigned(text)
    return text


_ATOMS = (bool, int, float, complex, type(None))
_SAFE = (
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    uuid.UUID,
    type,
)
_LEAVES = (str, bytes, bytearray, *_ATOMS)
_KEYS_AS_THEY_ARE = (*_ATOMS, *_SAFE, enum.Enum)
_END = object()
_UNBOUNDED = sys.maxsize


class _Scrubber:
    """One pass over a value with an explicit stack, so that depth cannot exhaust the interpreter.

    ``left`` bounds the nodes looked at; what lies beyond is left out, with a mark where that shows.
    """

    def __init__(self, by_key: bool, max_nodes: int, max_text: int | None = None) -> None:
        self.by_key = by_key
        self.left = max_nodes
        self.max_text = max_text
        self.texts = 0

    def run(self, value: Any) -> Any:
        out: list[Any] = []
        # Each frame: (build, collected, remaining iterator, id of the container)
        open_ids: set[int] = set()
        frames: list[tuple[Callable[[list[Any]], Any], list[Any], Any, int]] = []
        todo: Any = value
        while True:
            opened = None if todo is _END else self._open(todo, open_ids)
            if opened is not None:
                build, items = opened
                open_ids.add(id(todo))
                frames.append((build, [], iter(items), id(todo)))
            elif todo is not _END:
                (frames[-1][1] if frames else out).append(self._leaf(todo))
            while frames:
                build, got, rest, ident = frames[-1]
                self.left -= 1
                if self.left < 0:
                    got.append("[...]")
                todo = _END if self.left < 0 else next(rest, _END)
                if todo is not _END:
                    break
                frames.pop()
                open_ids.discard(ident)
                (frames[-1][1] if frames else out).append(build(got))
            if not frames:
                return out[0]

    def _open(
        self, value: Any, open_ids: set[int]
    ) -> tuple[Callable[[list[Any]], Any], Iterable[Any]] | None:
        """Return how to rebuild a container and what to visit, or None for a leaf."""
        if isinstance(value, _LEAVES) or id(value) in open_ids or self.left <= 0:
            return None
        kind = type(value)
        if kind is list:
            return list, value
        if kind is dict or isinstance(value, Mapping):
            return self._pairs(value.items())
        if isinstance(value, _pydantic("types", "SecretStr", "SecretBytes")):
            return None
        if isinstance(value, _pydantic("main", "BaseModel")):
            extra = getattr(value, "__pydantic_extra__", None) or {}
            return self._pairs([*value.__dict__.items(), *extra.items()])
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            return self._pairs([(f.name, getattr(value, f.name, None)) for f in fields])
        if isinstance(value, tuple):
            names = getattr(value, "_fields", None)
            if isinstance(names, tuple) and len(names) == len(value):
                _, items = self._pairs(list(zip(names, value, strict=True)))
                return _namedtuple(type(value)), items
            return tuple, value
        if isinstance(value, list):
            return list, value
        if isinstance(value, AbstractSet):
            return (frozenset if isinstance(value, frozenset) else _a_set), value
        return None

    def _pairs(
        self, pairs: Iterable[tuple[Any, Any]]
    ) -> tuple[Callable[[list[Any]], Any], Iterable[Any]]:
        keys: list[Any] = []
        items: list[Any] = []
        for key, item in itertools.islice(pairs, self.left):
            if self.by_key and isinstance(key, str) and _secret_key(key):
                item = item if item is None or isinstance(item, bool) else MASK
            clean = self._key(key)
            keys.append(clean)
            items.append(item)
        return (lambda got: dict(zip(keys, got, strict=False))), items

    def _key(self, key: Any) -> Any:
        if type(key) is str:
            return scrub_text(key, by_key=self.by_key)
        if isinstance(key, _KEYS_AS_THEY_ARE):
            return key
        if isinstance(key, bytes):
            return self._bytes(key)
        text = key if isinstance(key, str) else _as_str(key)
        return scrub_text(text, by_key=self.by_key)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._str(value)
        if isinstance(value, _ATOMS):
            return value
        if isinstance(value, (bytes, bytearray)):
            return self._bytes(bytes(value))
        if isinstance(value, (Mapping, tuple, list, AbstractSet)):
            return "[...]"  # refers to itself, or lies beyond the bound
        if isinstance(value, enum.Enum):
            return value if self._str(str(value.value)) == str(value.value) else MASK
        if isinstance(value, _SAFE):
            return value
        if isinstance(value, BaseException):
            return error_text(value)
        return self._str(_as_str(value))

    def _bytes(self, value: bytes) -> bytes:
        text = value.decode("latin-1")
        clean = self._str(text)
        return value if clean == text else clean.encode("latin-1", "replace")

    def _str(self, value: str) -> str:
        if self.max_text is not None and len(value) > self.max_text:
            over = len(value) - self.max_text
            return truncated(scrub_capped(value, self.max_text), self.max_text, over)
        if self.by_key and len(value) > 1 and value.lstrip()[:1] in ("{", "[", '"'):
            self.texts += 1
            parsed = _json(value) if self.texts <= 1000 else None
            if isinstance(parsed, (dict, list)) or (isinstance(parsed, str) and parsed != value):
                inner = _Scrubber(self.by_key, self.left, self.max_text)
                inner.texts = self.texts if isinstance(parsed, str) else 0
                inner.texts += 500  # JSON in JSON is followed twice, no further
                clean = inner.run(parsed)
                if clean == parsed:
                    return value
                try:
                    return json.dumps(clean, ensure_ascii=False)
                except (RecursionError, ValueError, TypeError):
                    return MASK
        return scrub_text(str(value), by_key=self.by_key)


def _pydantic(module: str, *names: str) -> tuple[type, ...]:
    """Classes of pydantic; none where it is not loaded, since then nothing is made of them."""
    loaded = sys.modules.get(f"pydantic.{module}")
    return tuple(kind for name in names if (kind := getattr(loaded, name, None)) is not None)


def _a_set(items: list[Any]) -> set[Any]:
    return set(items)


def _namedtuple(kind: type) -> Callable[[list[Any]], Any]:
    def build(items: list[Any]) -> Any:
        try:
            return kind._make(items)  # type: ignore[attr-defined]
        except Exception:
            return tuple(items)

    return build


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _as_str(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def scrub(value: Any, *, by_key: bool = True) -> Any:
    """Return a copy of a value with its secrets masked.

    Args:
        value: anything: containers, models, dataclasses, named tuples, JSON text, bytes,
            exceptions, or an object that is shown by its ``str``.
        by_key: also mask by key; False looks at values only.

    Returns:
        The same shape. Models and dataclasses come back as dicts, exceptions as text, unknown
        objects as their masked ``str``. Depth is not bounded; a container that refers to itself
        shows ``"[...]"`` there.

    >>> scrub({"api_key": "k", "next_page_token": "p2", "note": "Bearer abc.def.123"})
    {'api_key': '***', 'next_page_token': 'p2', 'note': '***'}

    Source: xstate-statemachine, agents reference: Reference.
    """
    return _Scrubber(by_key, _UNBOUNDED).run(value)


def truncated(text: str, max_chars: int, over: int) -> str:
    """Cut a text and say how much of the whole is missing."""
    return f"{text[:max_chars]}... [truncated {over} characters]"


def scrub_bounded(value: Any, *, max_nodes: int, max_text: int) -> Any:
    """`scrub`, looking at no more than so many values and so much of each text."""
    return _Scrubber(True, max_nodes, max_text).run(value)


def scrub_capped(text: str, max_chars: int) -> str:
    """`scrub` for text of which no more than ``max_chars`` will be shown.

    Only the beginning is looked at. What is cut off may cut a secret in two, so a margin longer
    than any secret is read with it, masked with it, and thrown away.
    """
    if len(text) <= max_chars:
        return str(_Scrubber(True, _UNBOUNDED).run(text))
    if len(text) <= max_chars + _MARGIN:
        return str(_Scrubber(True, _UNBOUNDED).run(text))[:max_chars]
    return scrub_text(text[: max_chars + _MARGIN])[:-_MARGIN][:max_chars]


_MARGIN = 8192


def error_text(error: BaseException, *, chain: bool = True, max_chars: int = 500) -> str:
    """Return an exception as one masked line: class name and text, then what caused it.

    >>> error_text(ValueError("password=hunter2 was refused"))
    'ValueError: password=*** was refused'
    """
    parts: list[str] = []
    at: BaseException | None = error
    while at is not None and len(parts) < (5 if chain else 1):
        text = scrub_capped(" ".join(_as_str(at)[: max_chars + 4 * _MARGIN].split()), max_chars + 1)
        text = text if len(text) <= max_chars else text[:max_chars] + "..."
        parts.append(f"{type(at).__name__}: {text}" if text else type(at).__name__)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return " <- ".join(parts)
