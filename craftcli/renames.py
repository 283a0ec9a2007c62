"""The dataset's names for what a policy calls otherwise."""


def parse_renames(text: str) -> dict[str, str]:
    """Read pairs such as `observation.images.cam=observation.images.top`, with commas between.

    >>> parse_renames("a=b, c=d")
    {'a': 'b', 'c': 'd'}
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
