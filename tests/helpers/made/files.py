"""What lies in a folder."""

from pathlib import Path


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file by its name, with its bytes; folders have none."""
    return {
        str(entry.relative_to(folder)): entry.read_bytes() if entry.is_file() else None
        for entry in folder.rglob("*")
    }
