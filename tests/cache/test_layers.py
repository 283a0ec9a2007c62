import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craftcli.cache.layers import parse_layers, resolve_layers
from craftcli.errors import EXIT_USAGE, CraftError

properties = settings(deadline=None, derandomize=True, max_examples=50)


@properties
@given(count=st.integers(1, 40), data=st.data())
def test_both_signs_name_the_same_layer(count: int, data: st.DataObject) -> None:
    layers = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    negative = [layer - count for layer in layers]
    assert resolve_layers(layers, count) == tuple(layers)
    assert resolve_layers(negative, count) == tuple(layers)
    assert [range(count)[layer] for layer in negative] == layers


@pytest.mark.parametrize(
    ("layers", "expected"), [([-2, -1], (10, 11)), ([-1, 0, 5], (11, 0, 5)), ([-12], (0,))]
)
def test_order_is_kept(layers: list[int], expected: tuple[int, ...]) -> None:
    assert resolve_layers(layers, 12) == expected


@pytest.mark.parametrize("layer", [12, -13, 100])
def test_out_of_range_lists_what_is_valid(layer: int) -> None:
    with pytest.raises(CraftError, match=rf"No layer {layer} .* -12 to 11") as caught:
        resolve_layers([-1, layer], 12)
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize("layers", [[3, 3], [-1, 11], [0, 5, -12]])
def test_a_layer_named_twice_is_refused(layers: list[int]) -> None:
    with pytest.raises(CraftError, match=r"more than once.*-12 to 11") as caught:
        resolve_layers(layers, 12)
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("text", "expected"), [("-2,-1", (-2, -1)), (" 0 , 3 ", (0, 3)), ("7", (7,))]
)
def test_parse(text: str, expected: tuple[int, ...]) -> None:
    assert parse_layers(text) == expected


@pytest.mark.parametrize("text", ["", " ", "a", "1,", "1;2", "1.5", "-2 -1"])
def test_parse_refuses_what_is_not_a_list_of_integers(text: str) -> None:
    with pytest.raises(CraftError, match=r"Cannot read the layers .* Fix: ") as caught:
        parse_layers(text)
    assert caught.value.exit_code == EXIT_USAGE
