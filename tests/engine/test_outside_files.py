"""Which files of a dataset and of a policy belong to what a run depends on."""

from pathlib import Path

from tiny.world import CAMERAS, write_dataset

from craftcli.demo.configuration_tiny_pi0_fast import TEACHER_FOLDER
from craftcli.engine.outside_files import dataset_files, policy_files


def test_all_of_a_dataset_but_notes(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data", videos=True)
    for note in ("README.md", "meta/notes.txt", "meta/.hidden.json", "videos/.DS_Store"):
        (root / note).write_text("mine")
    found = dataset_files(root)
    assert sorted(found) == sorted(
        [
            "meta/info.json",
            "meta/stats.json",
            "meta/tasks.parquet",
            "meta/episodes/chunk-000/file-000.parquet",
            "data/chunk-000/file-000.parquet",
            *(f"videos/{camera}/chunk-000/file-000.mp4" for camera in CAMERAS),
        ]
    )
    assert list(found)[-1].startswith("videos/")  # the large ones come last


def test_folders_behind_links_belong_to_it(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data", videos=True)
    (root / "videos").rename(tmp_path / "elsewhere")
    (root / "videos").symlink_to(tmp_path / "elsewhere")
    assert sum(name.startswith("videos/") for name in dataset_files(root)) == len(CAMERAS)


def test_a_policy_with_its_processors_and_tokenizers(tmp_path: Path) -> None:
    found = set(policy_files(TEACHER_FOLDER))
    every = {f.relative_to(TEACHER_FOLDER).as_posix() for f in TEACHER_FOLDER.rglob("*.*")}
    assert found == every
    assert {"config.json", "model.safetensors", "text_tokenizer/tokenizer.json"} <= found


def test_runs_and_notes_in_the_folder_of_a_policy_do_not_belong_to_it(tmp_path: Path) -> None:
    for name in ("config.json", "train_config.json", "README.md", "run/craft_config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert list(policy_files(tmp_path)) == ["config.json"]
