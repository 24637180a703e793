"""Which names a model may be served under. Pure.

A uid stands as path segments in the REST API (``/v1/models/{uid}/events``), so it must survive every client's and proxy's tidying of
paths (``..``, ``//``) and must not read like one of the API's own routes: ``demo/xavier`` would be the cache of ``demo``.
"""

import re

MODEL_UID_CHARACTERS = 128
ALPHABET = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,126}[A-Za-z0-9])?")
# Segments with a meaning below /v1/models/{uid}, and names of doors that a model's could be taken for.
ROUTE_WORDS = frozenset(
    "abort cancel clear events health logs metrics ready replicas requests restart scale stream version xavier".split()
)  # fmt: skip


def why_not(model_uid: str) -> str | None:
    """What is wrong with a uid, in words that end a sentence about it; None if nothing is."""
    if not ALPHABET.fullmatch(model_uid):
        limit = MODEL_UID_CHARACTERS
        return f"it may hold letters, digits and . _ / - ({limit} at most), and starts and ends with a letter or digit"
    for segment in model_uid.split("/"):
        if segment in ("", ".", ".."):
            return f"the parts between its slashes cannot be empty, '.' or '..': {model_uid!r}"
        if segment in ROUTE_WORDS:
            return f"{segment!r} between its slashes would read as a path of the API; choose another word"
    return None


def slug(text: str) -> str:
    """The nearest text in the alphabet of uids: everything else becomes ``-``. It can be empty, and still be no uid."""
    return re.sub(r"[^A-Za-z0-9._/-]+", "-", text)[:MODEL_UID_CHARACTERS].strip("._/-")
