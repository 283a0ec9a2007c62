"""Caches that somebody encoded anew with stock zarr: compressed, big endian, other keys."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ZstdCodec

from craftcli.cache.reading.reader import CacheReader
from craftcli.errors import CraftError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ENCODINGS: dict[str, dict[str, Any]] = {
    "zstd": {"compressors": ZstdCodec()},
    "zstd and crc32c": {"compressors": [ZstdCodec(), Crc32cCodec()]},
    "gzip": {"compressors": GzipCodec()},
    "nothing": {"compressors": None},
    "big endian": {"serializer": BytesCodec(endian="big"), "compressors": Crc32cCodec()},
    "other keys": {
        "compressors": Crc32cCodec(),
        "chunk_key_encoding": {"name": "v2", "separator": "."},
    },
}
Values = npt.NDArray[Any]


def write(path: Path, *, rows: int = 20, chunk: int = 8, packed: bool = False) -> Values:
    """A cache of two layers [rows, 2, 16] float16 with some empty rows; its hidden states."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from synthetic import activations, write_cache
    finally:
        sys.path.remove(str(BENCHMARKS))
    hidden: Values = activations(rows, 2, 16)
    hidden[1::5] = 0
    tokens = np.arange(rows * 3).reshape(rows, 3)
    write_cache(path, hidden, {"inputs/tokens": tokens}, chunk=chunk, packed=packed)
    return hidden


def encode_anew(
    source: Path, target: Path, encoding: dict[str, Any], chosen: Callable[[str], bool]
) -> Path:
    """Copy a cache with stock zarr, the chosen arrays in another encoding."""
    old = zarr.open_group(source, mode="r")
    new = zarr.create_group(target, zarr_format=3, attributes=old.attrs.asdict())
    for name, array in old.members(max_depth=None):
        if isinstance(array, zarr.Array):
            how = encoding if chosen(name) else {"compressors": Crc32cCodec()}
            copy = new.create_array(
                name,
                shape=array.shape,
                chunks=array.chunks,
                dtype=array.dtype,
                fill_value=0,
                attributes=array.attrs.asdict(),
                # What craft wrote has every chunk; a stock copy leaves out those of zeros.
                config={"write_empty_chunks": not chosen(name)},
                **({"filters": None} | how),
            )
            copy[:] = array[:]
    return target


def rows_only(name: str) -> bool:
    return not name.startswith(("stats", "commit"))


@pytest.fixture(scope="module", autouse=True)
def _no_sync() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        yield


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    write(tmp_path / "plain.zarr")
    return tmp_path / "plain.zarr"


@pytest.mark.parametrize("memory", ["ram", "mmap"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rows_come_through_every_encoding(
    cache: Path, tmp_path: Path, encoding: str, memory: str
) -> None:
    path = encode_anew(cache, tmp_path / "new.zarr", ENCODINGS[encoding], rows_only)
    plain, reader = CacheReader.open(cache), CacheReader.open(path, memory=memory)
    assert reader.fetches
    assert reader.verify() == []
    rows = np.array([19, 0, 7, 8, 7])
    reader.prefetch(rows, reader.array_names())
    for name in reader.array_names():
        read = reader.read(name, rows)
        np.testing.assert_array_equal(read, plain.read(name, rows))
        assert read.dtype == np.dtype(reader.spec(name).dtype)
        np.testing.assert_array_equal(reader.read_all(name), plain.read_all(name))
    np.testing.assert_array_equal(reader.stats("vlm.16").mean, plain.stats("vlm.16").mean)


@settings(deadline=None, derandomize=True, max_examples=5)
@given(
    rows=st.integers(1, 20),
    chunk=st.integers(1, 20),
    encoding=st.sampled_from(list(ENCODINGS)),
    memory=st.sampled_from(["ram", "mmap"]),
    data=st.data(),
)
def test_any_rows_of_any_shape(
    rows: int, chunk: int, encoding: str, memory: str, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        hidden = write(Path(folder, "a"), rows=rows, chunk=min(chunk, rows))
        names = data.draw(st.sets(st.sampled_from(["hidden", "index", "inputs", "valid"])))
        path = encode_anew(
            Path(folder, "a"),
            Path(folder, "b"),
            ENCODINGS[encoding],
            lambda name: name.partition("/")[0] in names,
        )
        wanted = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=9)), np.int64)
        reader = CacheReader.open(path, memory=memory)
        np.testing.assert_array_equal(reader.read("hidden/vlm.17", wanted), hidden[wanted, 1])


@pytest.mark.filterwarnings("ignore:Combining a `sharding_indexed` codec")
@pytest.mark.parametrize("encoding", ["zstd and crc32c", "big endian"])
def test_packed_rows_may_be_encoded_anew(tmp_path: Path, encoding: str) -> None:
    hidden = write(tmp_path / "a.zarr", packed=True)
    path = encode_anew(
        tmp_path / "a.zarr", tmp_path / "b.zarr", ENCODINGS[encoding], lambda _: True
    )
    reader = CacheReader.open(path)
    assert reader.verify() == []
    np.testing.assert_array_equal(reader.read_all("hidden/vlm.17"), hidden[:, 1])
    file = path / "hidden/vlm.17/c/1/0/0"
    file.unlink()
    with pytest.raises(CraftError, match=r"chunk 1 \(rows 8 to 15\)"):
        CacheReader.open(path).read("hidden/vlm.17", np.array([9]))


def test_everything_may_be_compressed_if_the_statistics_keep_their_checksum(
    cache: Path, tmp_path: Path
) -> None:
    kept = ENCODINGS["zstd and crc32c"]
    path = encode_anew(cache, tmp_path / "kept.zarr", kept, lambda _: True)
    assert CacheReader.open(path).verify() == []
    path = encode_anew(cache, tmp_path / "lost.zarr", ENCODINGS["zstd"], lambda _: True)
    with pytest.raises(CraftError, match=r"stats/.* is encoded without crc32c"):
        CacheReader.open(path)


@pytest.mark.parametrize("encoding", ["zstd", "nothing", "big endian"])
@pytest.mark.parametrize("name", ["hidden/vlm.16/c/1/0/0", "inputs/tokens/c/1/0"])
def test_a_flipped_bit_is_found_before_the_row_is_used(
    cache: Path, tmp_path: Path, encoding: str, name: str
) -> None:
    path = encode_anew(cache, tmp_path / "new.zarr", ENCODINGS[encoding], rows_only)
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    reader = CacheReader.open(path)
    assert [problem for problem in reader.verify() if "chunk 1 (rows 8 to 15)" in problem]
    # A commit record vouches for a chunk of all arrays.
    for array in ("valid", "hidden/vlm.16"):
        with pytest.raises(CraftError, match=r"chunk 1 \(rows 8 to 15\)"):
            reader.read(array, np.array([9]))
        reader.read(array, np.array([0, 16]))


def test_a_lost_chunk_is_not_read_as_zeros(cache: Path, tmp_path: Path) -> None:
    path = encode_anew(cache, tmp_path / "new.zarr", ENCODINGS["zstd"], rows_only)
    (path / "hidden/vlm.16/c/0/0/0").unlink()
    with pytest.raises(CraftError, match=r"chunk 0 \(rows 0 to 7\)"):
        CacheReader.open(path).read("hidden/vlm.16", np.array([3]))


def test_lost_statistics_are_not_read_as_zeros(cache: Path, tmp_path: Path) -> None:
    kept = ENCODINGS["zstd and crc32c"]
    path = encode_anew(cache, tmp_path / "new.zarr", kept, lambda _: True)
    (path / "stats/vlm.16/mean/c/0/0").unlink()
    with pytest.raises(CraftError, match=r"stats/vlm\.16/mean .* missing"):
        CacheReader.open(path).stats("vlm.16")


def test_a_chunk_is_decoded_once_to_be_checked_and_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = encode_anew(cache, tmp_path / "new.zarr", ENCODINGS["zstd"], rows_only)
    decoded: list[tuple[str, int]] = []
    get = zarr.Array.__getitem__

    def noted(self: zarr.Array[Any], rows: slice) -> Any:
        decoded.append((self.path, rows.start // self.chunks[0]))
        return get(self, rows)

    monkeypatch.setattr(zarr.Array, "__getitem__", noted)
    reader = CacheReader.open(path)
    for name in reader.array_names():
        reader.read(name, np.array([3]))
    assert sorted(decoded) == [(name, 0) for name in reader.array_names()]
