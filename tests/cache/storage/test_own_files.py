"""Which files below a cache are craft's own."""

from pathlib import Path

from craftcli.cache.storage.local_folder import LocalFolder

OWN = ("zarr.0123456789abcdef0123456789abcdef.partial", "valid/c/3.0123abcd.partial")
USERS = ("notes.partial", "valid/c/mine.partial", "a.b.0123abcd.partial", "x.0123xyz9.partial")


def test_only_names_that_craft_makes_are_removed(tmp_path: Path) -> None:
    for name in (*OWN, *USERS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("content")
    (tmp_path / "kept.0123abcd.partial").mkdir()
    (tmp_path / "link.0123abcd.partial").symlink_to("notes.partial")
    LocalFolder(tmp_path).remove_temporary_files()
    left = {f.relative_to(tmp_path).as_posix() for f in tmp_path.rglob("*.partial")}
    assert left == {*USERS, "kept.0123abcd.partial", "link.0123abcd.partial"}
