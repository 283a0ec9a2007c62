"""What `--lora` asks for: the rank and scale of low-rank adapters, and which modules get them."""

from dataclasses import dataclass

DEFAULT_RANK = 8
_KEYS = ("r", "alpha", "targets")


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters to train instead of the weights."""

    r: int = DEFAULT_RANK
    alpha: int
    """What adapters add is multiplied by alpha / r."""
    targets: tuple[str, ...] = ()
    """Names or ends of names of modules, `*` for any part; none for the policy's own choice."""


def parse_lora(text: str) -> LoraSpec:
    """What a text such as `r=8,alpha=16,targets=q_proj;v_proj` means, or a ValueError.

    >>> parse_lora("r=4")
    LoraSpec(r=4, alpha=8, targets=())
    """
    pairs = [part.partition("=") for part in text.split(",")]
    given = {key.strip(): value.strip() for key, _, value in pairs}
    unknown = [key for key in given if key not in _KEYS]
    if unknown:
        raise ValueError(f"has {unknown[0]!r}, not one of {', '.join(_KEYS)}")
    if len(given) < len(pairs):
        raise ValueError(f"{text} gives one of {', '.join(_KEYS)} twice")
    targets = tuple(t.strip() for t in given["targets"].split(";")) if "targets" in given else ()
    if "targets" in given and not all(targets):
        raise ValueError("has an empty name among its targets, which are joined by ;")
    r = _whole("r", given.get("r", str(DEFAULT_RANK)))
    # Twice the rank: what adapters add then has the same scale at every rank.
    return LoraSpec(r=r, alpha=_whole("alpha", given.get("alpha", str(2 * r))), targets=targets)


def _whole(key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"has {key}={value}, not a whole number above 0")
    return int(value)
