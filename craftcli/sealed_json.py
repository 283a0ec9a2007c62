"""JSON files that carry a digest of their content, so that a changed one is noticed."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

DIGEST = "digest"
"""The field with the digest of all other fields."""


def json_digest(content: Mapping[str, Any]) -> str:
    """Digest of JSON values; spaces and the order of the fields do not matter."""
    plain = json.loads(json.dumps(content))
    text = json.dumps(plain, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with its digest."""
    return {**content, DIGEST: json_digest(content)}


def unsealed(content: Any) -> dict[str, Any]:
    """The content of a file without its digest; files of earlier versions have none.

    Raises:
        ValueError: it is not an object, or not what was written.
    """
    if not isinstance(content, dict):
        raise ValueError(f"it holds {type(content).__name__}, not an object")
    found = {name: value for name, value in content.items() if name != DIGEST}
    if DIGEST in content and content[DIGEST] != json_digest(found):
        raise ValueError("it has changed since it was written")
    return found
