"""Shortens labels so that they fit beside a plot."""

from collections.abc import Sequence


def distinct(names: Sequence[str], columns: int) -> list[str]:
    """Shorten names to `columns`; if one is too long, first drop the words that all share.

    >>> distinct(("put the red bowl on the plate", "put the bowl on the plate"), 20)
    ['… red bowl …', '… bowl …']
    """
    words = [name.split() for name in names]
    if len(words) > 1 and any(len(" ".join(name)) > columns for name in words):
        # At least one word of each name stays.
        start = _common([name[:-1] for name in words])
        end = _common([name[:start:-1] for name in words])
        words = [
            [*(["…"] * (start > 0)), *name[start : len(name) - end], *(["…"] * (end > 0))]
            for name in words
        ]
    return [shorten(" ".join(name), columns) for name in words]


def shorten(text: str, columns: int) -> str:
    """Keep the start of a text.

    >>> shorten("pick up the cube", 10)
    'pick up t…'
    """
    return text if len(text) <= columns else text[: columns - 1] + "…"


def tail(text: str, columns: int) -> str:
    """Keep the end of a text, the most telling part of a path.

    >>> tail("/home/me/outputs/policy", 10)
    '…ts/policy'
    """
    return text if len(text) <= columns else "…" + text[1 - columns :]


def _common(names: list[list[str]]) -> int:
    """How many words at the start are the same in all names."""
    shared = 0
    for words in zip(*names, strict=False):
        if len(set(words)) > 1:
            break
        shared += 1
    return shared
