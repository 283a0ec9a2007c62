"""Text values with a structure of their own: `--lora`, `--rename`, and choices joined by `+`."""

from dataclasses import dataclass
from enum import StrEnum

JOINED = "+"
"""Joins several modes or kinds, as in hidden+action."""

DEFAULT_RANK = 8
_LORA_KEYS = ("r", "alpha", "targets")


def split_joined[E: StrEnum](text: str, choices: type[E]) -> tuple[E, ...]:
    """The choices that a text such as hidden+action names, in the order of their class."""
    named = text.split(JOINED)
    return tuple(choice for choice in choices if choice in named)


def split_list(text: str | None) -> tuple[str, ...]:
    """The names in a text that separates them by commas, each once; None has none.

    >>> split_list("demo:red, demo:blue")
    ('demo:red', 'demo:blue')
    """
    names = (name.strip() for name in (text or "").split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def joined_problems(option: str, text: str, choices: type[StrEnum]) -> list[str]:
    """The problems of a text such as hidden+action: unknown or repeated names."""
    named = text.split(JOINED)
    unknown = [name for name in named if name not in list(choices)]
    if unknown:
        return [f"{option} has {unknown[0]!r}, not one of {', '.join(choices)}"]
    return [f"{option} {text} names one twice"] if len(set(named)) < len(named) else []


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """LoRA weights to train instead of the policy's own: their rank, scale and target modules."""

    r: int = DEFAULT_RANK
    alpha: int
    """The output of the LoRA weights is multiplied by alpha / r."""
    targets: tuple[str, ...] = ()
    """Names of modules or ends of names, `*` for any part; empty for the policy's own choice."""


def parse_lora(text: str) -> LoraSpec:
    """Read a text such as `r=8,alpha=16,targets=q_proj;v_proj`.

    >>> parse_lora("r=4")
    LoraSpec(r=4, alpha=8, targets=())

    Raises:
        ValueError: the text cannot be read.
    """
    pairs = [part.partition("=") for part in text.split(",")]
    given = {key.strip(): value.strip() for key, _, value in pairs}
    unknown = [key for key in given if key not in _LORA_KEYS]
    if unknown:
        raise ValueError(f"has {unknown[0]!r}, not one of {', '.join(_LORA_KEYS)}")
    if len(given) < len(pairs):
        raise ValueError(f"{text} gives one of {', '.join(_LORA_KEYS)} twice")
    targets = tuple(t.strip() for t in given["targets"].split(";")) if "targets" in given else ()
    if "targets" in given and not all(targets):
        raise ValueError("has an empty name among its targets, which are joined by ;")
    r = _positive("r", given.get("r", str(DEFAULT_RANK)))
    # Twice the rank, so that LoRA's output has the same scale at every rank.
    return LoraSpec(r=r, alpha=_positive("alpha", given.get("alpha", str(2 * r))), targets=targets)


def parse_renames(text: str) -> dict[str, str]:
    """Read pairs such as `observation.images.cam=observation.images.top`, separated by commas.

    >>> parse_renames("a=b, c=d")
    {'a': 'b', 'c': 'd'}

    Raises:
        ValueError: the text cannot be read.
    """
    pairs = [part.strip().split("=") for part in text.split(",")]
    wrong = [pair for pair in pairs if len(pair) != 2 or not all(pair)]
    if wrong:
        raise ValueError(f"has {'='.join(wrong[0])!r}, not OLD=NEW")
    for position, which in ((0, "from"), (1, "to")):
        given = [pair[position] for pair in pairs]
        repeated = [name for name in given if given.count(name) > 1]
        if repeated:
            raise ValueError(f"renames {which} {repeated[0]} twice")
    return dict(pairs)


def parse_fixed(text: str) -> dict[str, tuple[int, ...] | None]:
    """Read names of vectors and numbers in them, as in `state:0,3-5,environment_state`.

    None stands for all numbers of a vector.

    >>> parse_fixed("state:0,3-5,environment_state")
    {'state': (0, 3, 4, 5), 'environment_state': None}

    Raises:
        ValueError: the text cannot be read.
    """
    found: dict[str, tuple[int, ...] | None] = {}
    name = ""
    for part in (part.strip() for part in text.split(",")):
        head, colon, numbers = part.rpartition(":")
        is_range = part.replace("-", "", 1).isdecimal()
        if is_range and found.get(name) is not None:
            numbers = part
        elif is_range or not part or (colon and not head):
            raise ValueError(f"has {part!r} where a name is expected, as in NAME:0,3-5")
        else:
            name = head if colon else part
            if name in found:
                raise ValueError(f"names {name} twice")
            found[name] = () if colon else None
            if not colon:
                continue
        found[name] = (*(found[name] or ()), *_range(numbers))
    return found


def _range(text: str) -> range:
    low, dash, high = text.partition("-")
    if not low.isdecimal() or (dash and not high.isdecimal()) or int(high or low) < int(low):
        raise ValueError(f"has {text!r}, not a number or a range such as 3-5")
    return range(int(low), int(high or low) + 1)


def _positive(key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"has {key}={value}, not a whole number above 0")
    return int(value)
