"""What `--lora` may say."""

import pytest

from craftcli.config import TrainConfig
from craftcli.errors import EXIT_USAGE, CraftError
from craftcli.lora import LoraSpec, parse_lora


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("r=4", LoraSpec(r=4, alpha=8)),
        ("alpha=3", LoraSpec(r=8, alpha=3)),
        (
            " r=8, alpha=16, targets=q_proj; v_proj",
            LoraSpec(r=8, alpha=16, targets=("q_proj", "v_proj")),
        ),
    ],
)
def test_what_is_left_out_has_a_default(text: str, spec: LoraSpec) -> None:
    assert parse_lora(text) == spec
    assert TrainConfig(lora=text).adapters == spec


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has '', not one of r, alpha, targets"),
        ("rank=8", "has 'rank', not one of r, alpha, targets"),
        ("r=8,v_proj", "has 'v_proj', not one of r, alpha, targets"),
        ("r=8,r=4", "gives one of r, alpha, targets twice"),
        ("r=0", "has r=0, not a whole number above 0"),
        ("r=-1", "has r=-1, not a whole number above 0"),
        ("r=8.5", "has r=8.5, not a whole number above 0"),
        ("r=8,alpha=x", "has alpha=x, not a whole number above 0"),
        ("targets=", "has an empty name among its targets"),
        ("targets=q_proj;", "has an empty name among its targets"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(text: str, problem: str) -> None:
    with pytest.raises(CraftError) as caught:
        TrainConfig(lora=text)
    assert f"--lora {problem}" in caught.value.why or problem in caught.value.why
    assert caught.value.exit_code == EXIT_USAGE
