"""Letters that a terminal cannot show are spelled out: λ as lambda, ✓ as ok."""

import codecs
import io
import sys

HANDLER = "craft-spell-out"
_SPELLED = {
    "λ": "lambda",
    "ε": "epsilon",
    "θ": "theta",
    "α": "alpha",
    "η": "eta",
    "ν": "nu",
    "✓": "ok",
    "✗": "x",
    "≤": "<=",
    "≥": ">=",
    "→": "->",
    "×": "x",
    "±": "+-",
    "–": "-",
    "…": "...",
    "’": "'",
}


def spell_out(error: UnicodeError) -> tuple[str, int]:
    """A handler of encoding errors: the letters in words, or ? for those without one."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(_SPELLED.get(letter, "?") for letter in letters), error.end


def set_up_streams() -> None:
    """Let standard output and error spell out what their encoding lacks, instead of failing."""
    codecs.register_error(HANDLER, spell_out)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=HANDLER)


def shows_all_letters(encoding: str | None) -> bool:
    """Whether text in this encoding needs no spelling out."""
    return (encoding or "").lower().replace("-", "").startswith("utf")
