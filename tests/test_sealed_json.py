import json

import pytest

from craftcli.sealed_json import DIGEST, sealed, unsealed

CONTENT = {"b": [1, 2.5e-7, None], "a": {"ä": float("nan"), "1": (True,)}}


def test_what_is_sealed_is_read_back_whatever_its_layout() -> None:
    text = json.dumps(sealed(CONTENT), indent=3)
    shuffled = json.dumps(dict(reversed(json.loads(text).items())), ensure_ascii=False)
    for written in (text, shuffled):
        assert json.dumps(unsealed(json.loads(written)), sort_keys=True) == json.dumps(
            CONTENT, sort_keys=True
        )


def test_every_changed_digit_is_noticed() -> None:
    text = json.dumps(sealed({"steps": 120, "seconds": 3.25}))
    for place, letter in enumerate(text):
        if letter.isdigit():
            changed = text[:place] + str((int(letter) + 1) % 10) + text[place + 1 :]
            with pytest.raises(ValueError, match="has changed since it was written"):
                unsealed(json.loads(changed))


def test_files_of_earlier_versions_have_no_digest() -> None:
    assert unsealed({"steps": 1}) == {"steps": 1}


@pytest.mark.parametrize("content", [[], None, "text", {DIGEST: None}, {DIGEST: 1, "a": 2}])
def test_anything_else_is_refused(content: object) -> None:
    with pytest.raises(ValueError, match="it h"):
        unsealed(content)
