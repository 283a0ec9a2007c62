"""Locks on bytes of a file where neither fcntl nor msvcrt is there; the others run with builds."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from craftcli.system import file_locks


def test_a_system_without_locks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fcntl", "msvcrt"):
        monkeypatch.setitem(sys.modules, name, None)
    assert file_locks.__file__ is not None
    spec = importlib.util.spec_from_file_location("without_locks", file_locks.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    descriptor = os.open(tmp_path / "a.lock", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(OSError, match="no file locks"):
            module.lock_bytes(descriptor, 0)
    finally:
        os.close(descriptor)
