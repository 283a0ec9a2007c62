"""An attribute is replaced inside the block and restored after it, whatever happens."""

from types import SimpleNamespace

import pytest

from craftcli.patching import replaced


def test_the_attribute_is_restored() -> None:
    owner = SimpleNamespace(name="before")
    with replaced(owner, "name", "inside"):
        assert owner.name == "inside"
    assert owner.name == "before"


def test_it_is_restored_after_an_error() -> None:
    owner = SimpleNamespace(name="before")
    with pytest.raises(KeyError), replaced(owner, "name", "inside"):
        raise KeyError
    assert owner.name == "before"


def test_an_attribute_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError), replaced(SimpleNamespace(), "name", "inside"):
        pytest.fail("must not run")
