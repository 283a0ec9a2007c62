"""The cache format, version 2.0: the arrays, the manifest, and what they mean.

A cache is a Zarr v3 group in a folder. Every array except `commit` and `stats/` has the row axis
first. Its chunks have `rows_per_chunk` rows and are not divided along other axes, so that chunk `k`
holds the same rows in every array. The codecs are `bytes` (little endian) and `crc32c`: a chunk
file is its raw rows, then four bytes of checksum. The last chunk is padded with zeros to full
length. Chunks of zeros are written like any other. N is the number of rows, V the number of vectors
of a row, D the width of a vector.

The arrays in the manifest's `packed` do not store the slots that a row leaves empty. Slots are the
first axis of a row, such as V. Their codecs are `sharding_indexed` and `crc32c`: a chunk file has
pieces of one row and a few slots, those of zeros left out, an index, and four bytes of checksum
(`storage.packed_chunks`). The inner chunk has as many slots as divide the axis, at most 8. With
`hidden/<stack>.<layer>` its `mean` and `variance` are packed too, in pieces of one vector.

    array                     shape      dtype
    hidden/<stack>.<layer>    [N, V, D]  float32, float16, or bfloat16 kept as uint16 with the
                                         array attribute {"craft_dtype": "bfloat16"}
    hidden_mask               [N, V]     bool, true where a vector is a target
    inputs/<key>              [N, ...]   any fixed-width dtype: the model inputs the teacher saw;
                                         uint8 with the attribute {"craft_scale": "1/255"} stands
                                         for float32 images; none when `images` is "reference"
    outputs/labels            [N, S]     int64 or int32, the teacher's token ids, -100 where
                                         nothing is predicted
    outputs/prediction        [N, S, D'] float32, the teacher's prediction: actions, velocities
                                         or noise
    outputs/top_tokens        [N, S, K]  int32, the teacher's K most likely tokens
    outputs/top_logprobs      [N, S, K]  float32, their log-probabilities over all tokens
    outputs/mask              [N, S]     bool, true where a prediction is a target
    index/dataset_index       [N]        int64, index of the frame in the dataset, or in the
                                         manifest's `datasets` one after the other
    index/episode             [N]        int64
    index/frame               [N]        int64, index of the frame in its episode
    index/task                [N]        int64 into the group attribute "tasks"
    variation/partner         [N]        int64, index of the second frame of a made row; -1 for a
                                         frame with other draws and for a state from statistics
    variation/weight          [N]        float32, weight of its first frame
    variation/seed            [N]        int64, seed of a made row; -1 for a frame as it is
    digests/images            [N]        uint64, digest of the camera images of the row's frame, as
                                         the dataset gave them
    digests/action            [N]        uint64, digest of the frame's own action in the dataset
    digests/brightness        [N, B]     uint8, mean brightness of 4 x 4 blocks of each camera's
                                         images, if they are frames of videos
    valid                     [N]        bool
    commit                    [chunks]   uint32, one record for each chunk
    stats/<stack>.<layer>/    mean [V, D] float64, variance [V, D] float64, count [V] int64

The arrays depend on `kinds`. With "hidden" there are `hidden/`, `hidden_mask` and `stats/`; without
it `layers` is empty and `vectors` and `dim` are 1. With "token_ce" there is `outputs/labels`. With
"action" there is `outputs/mask`, and either `outputs/prediction` or, for a policy that predicts
tokens, `outputs/top_tokens` and `outputs/top_logprobs`.

The group attributes are "craft", the manifest below; "arrays", the row shape, dtype and attributes
of each array with a row axis, so that a lost array is noticed; "tasks", a list of task strings; and
"digest", the sha256 of the canonical JSON of these three without `complete`, so that any change is
noticed. An empty digest or fingerprint means unknown (an imported cache). A dataset fingerprint
that starts with `mixed:` means rows of several datasets whose frames cannot be found again; one
that starts with `several:` means rows of the manifest's `datasets`. Their frames and episodes are
counted through, in the order of the list.

A row is valid where `valid` is true: the teacher was run on it, its inputs and index are complete,
and every output and every vector with a true `hidden_mask` is finite. The contents of other rows
are undefined. `stats` covers the vectors of valid rows with a true `hidden_mask`. The manifest's
`stats_digests` has the sha256 of each layer's mean, variance and count, one after the other as
little-endian numbers.

`digests/` is there if the rows are frames of a dataset: frames that are read from it again must be
the same ones. It describes a frame before it was mixed with another (`row_digests`). Digests are a
blake2b of eight bytes. Videos decoded by another `decoder` than at the build are compared by their
brightness.

`commit[k]` is the crc32c of the checksums (the last four bytes) of the files of chunk `k`, over all
arrays with a row axis in the order of their sorted names, and 1 if that is 0. It is written after
these files are on disk; 0 means that the chunk is missing. `complete` becomes true after the last
chunk.

Versions are "major.minor". A reader refuses a newer major version and reads older ones. A newer
minor version may only add manifest fields and arrays, which older readers ignore. A cache is
written in the newest version of its major one: 2 with packed arrays, which earlier versions of
craft cannot read, else 1. Added in 1.1: the manifest fields `actions` and `layout`, and the arrays
of the kind "action". Added in 1.2: `made` and `variation/`. Added in 1.3: `stats_digests`,
`decoder`, `statistics`, `datasets` and `digests/`. Added in 2.0: `packed`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from craftcli.choices import IGNORED_LABEL as IGNORED_LABEL
from craftcli.config.records import read_record, record_to_json
from craftcli.errors import CraftError
from craftcli.policies.identity import DatasetIdentity, TeacherIdentity

UNPACKED_VERSION, FORMAT_VERSION = "1.3", "2.0"
"""The versions that this craft writes, the latter with packed arrays; it reads every older one."""
KINDS = ("hidden", "token_ce", "action")
DTYPES = ("float32", "float16", "bfloat16")
IMAGES = ("reference", "embedded")
SAMPLING = ("uniform", "per_episode", "per_task", "per_phase", "indices")
ACTIONS = ("teacher", "data")
LAYOUTS = ("bsd", "sbd", "bds", "bd")
LABELS = "outputs/labels"
OUTPUT_MASK = "outputs/mask"
PREDICTION = "outputs/prediction"
TOP_TOKENS = "outputs/top_tokens"
TOP_LOGPROBS = "outputs/top_logprobs"
DIGESTS = "digests/"
"""Before the names of the arrays with digests of frames."""
CHUNK_BYTES = 16 * 1024**2
_PAGE_BYTES = 16 * 1024
"""A multiple of the page size of every common system, the same everywhere: so are the chunks."""

METADATA_BYTES = 16 * 1024**2
"""The largest `zarr.json` of a cache that is read; those that craft writes have a few kilobytes."""
LONGEST_TASK = 65536
_LONGEST_TEXT = 4096
"""The longest text in a manifest: paths are no longer. Also the most entries of a list."""
_PROBLEMS_SHOWN = 10

_REBUILD = "restore the file from a copy, or rebuild it with craft cache build --overwrite."


@dataclass(frozen=True, kw_only=True)
class MadeRows:
    """How rows were made that no dataset holds."""

    source: str
    """augment: variations of frames; draws: frames with other draws; statistics: drawn states;
    rollouts: frames that the teacher saw when it acted."""
    rows: int
    """How many rows were made: those with a `variation/seed` of 0 or more."""
    settings: dict[str, str] = field(default_factory=dict)
    """What else decides them."""

    def describe(self) -> str:
        """The source and its settings in words.

        >>> MadeRows(source="augment", rows=3, settings={"noise": "0.3"}).describe()
        'mixtures of frames (noise 0.3)'
        """
        sources = " and ".join(_MADE_FROM.get(name, name) for name in self.source.split("+"))
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return f"{sources} ({settings})" if settings else sources


_MADE_FROM = {
    "augment": "mixtures of frames",
    "draws": "frames with other draws",
    "statistics": "states from the statistics of the teacher's normaliser",
    "rollouts": "frames that the teacher saw when it acted",
}


WITHOUT_DATASET = ("statistics", "rollouts")
"""Sources of made rows that need no dataset."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that must match for a cache to be usable, under the group attribute "craft"."""

    format_version: str = UNPACKED_VERSION
    """Version of this format, "major.minor"."""
    kinds: tuple[str, ...] = ("hidden",)
    """What the rows hold of the teacher: any of hidden, token_ce, action."""
    complete: bool
    """Whether every row was written."""
    rows: int
    """Rows in every array, valid or not."""
    rows_per_chunk: int
    """Rows in every chunk but the last, in every array."""
    stack: str
    """The recorded stack of layers: a name of the policy family, or a path with dots."""
    layout: str | None = None
    """Axes of the states of a stack given by its path: bsd, sbd, bds or bd; null for a name."""
    layers: tuple[int, ...]
    """Recorded layers, counted from 0 (negative numbers already resolved)."""
    layer_count: int
    """Depth of the stack."""
    pooling: str
    """How token positions became vectors."""
    vectors: int
    """Vectors of a row in each layer."""
    dim: int
    """Width of a vector."""
    dtype: str
    """Dtype of the hidden states: float32, float16 or bfloat16."""
    images: str
    """Where the images are: "embedded" (under inputs/) or "reference" (in the dataset)."""
    sampling: str
    """How the rows were selected: uniform, per_episode, per_task, per_phase or indices."""
    prompts_digest: str | None
    """Digest of the instructions that replaced those of the dataset; null if none did."""
    actions: str | None = None
    """The action inputs of a policy that has them: "teacher" or "data"; null if unknown."""
    seed: int
    """Seed of the sample selection, and of what the policy draws at random."""
    teacher: TeacherIdentity
    """The policy that made the hidden states."""
    dataset: DatasetIdentity
    """The samples they were made on; of several datasets, all of them together."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the packages that built the cache."""
    made: MadeRows | None = None
    """How rows were made that no dataset holds; null if all rows are frames of the dataset."""
    stats_digests: dict[str, str] | None = None
    """Digest of the statistics by layer, written when the build ends; null in older caches."""
    decoder: str | None = None
    """What decoded the videos of the dataset, with its version; null if it has none."""
    statistics: dict[str, dict[str, tuple[float, ...]]] | None = None
    """Statistics that normalised the inputs, by feature, if they were not the teacher's own."""
    datasets: tuple[DatasetIdentity, ...] | None = None
    """The datasets of the rows in their order, if they are several; null for a single one."""
    packed: tuple[str, ...] | None = None
    """The arrays that do not store the empty slots of a row; null if all rows are stored whole."""

    def __post_init__(self) -> None:
        problems = _value_problems(self)
        if problems:
            raise _corrupt(problems)

    @property
    def has_dataset(self) -> bool:
        """Whether the rows come from frames of a dataset."""
        return not any(source in WITHOUT_DATASET for source in self._made_from)

    @property
    def varied(self) -> bool:
        """Whether there are variations of frames among the rows."""
        return "augment" in self._made_from

    @property
    def _made_from(self) -> list[str]:
        return self.made.source.split("+") if self.made else []

    @property
    def parts(self) -> tuple[DatasetIdentity, ...]:
        """The datasets of the rows, several or one."""
        return self.datasets or (self.dataset,)

    @property
    def chunk_count(self) -> int:
        """Number of chunks along the row axis."""
        return -(-self.rows // self.rows_per_chunk)

    def chunk_rows(self, chunk: int) -> slice:
        """Rows of one chunk; the last may be shorter."""
        if not 0 <= chunk < self.chunk_count:
            raise IndexError(f"chunk {chunk} is not among the {self.chunk_count} of the cache")
        start = chunk * self.rows_per_chunk
        return slice(start, min(start + self.rows_per_chunk, self.rows))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; `from_json` reads it back.

        Fields that were added after version 1.1 are left out where they are null.
        """
        added = ("made", "stats_digests", "decoder", "statistics", "datasets", "packed")
        values = record_to_json(self)
        return {name: v for name, v in values.items() if v is not None or name not in added}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Read and check a manifest; the error names every missing, unknown or ill-typed field."""
        if not isinstance(data, Mapping):
            raise _corrupt([f"it is {type(data).__name__}, not an object"])
        if too_long := _too_long(data, ""):
            raise _corrupt(too_long)
        newer_minor = _check_version(data.get("format_version"))
        problems: list[str] = []
        manifest = read_record(cls, data, problems, allow_unknown=newer_minor)
        if problems or manifest is None:
            raise _corrupt(problems)
        return manifest


def layer_names(manifest: Manifest) -> list[str]:
    """Array names after `hidden/` and `stats/`, in the order of the manifest's layers."""
    return [f"{manifest.stack}.{layer}" for layer in manifest.layers]


def version_of(manifest: Manifest) -> str:
    """The version in which a cache is written: the one that most versions of craft can read."""
    return FORMAT_VERSION if manifest.packed else UNPACKED_VERSION


def rows_per_chunk(bytes_per_row: int, rows: int, target: int = CHUNK_BYTES) -> int:
    """The number of rows that make a chunk of up to `target` bytes of the widest array.

    The last chunk is filled up with zeros, so that all have about the same number of rows: whole
    pages of memory, which are mapped side by side, where that fills up at most a row in 32.

    >>> rows_per_chunk(bytes_per_row=1024, rows=100_000), rows_per_chunk(1000, rows=100_000)
    (14288, 14286)
    >>> rows_per_chunk(bytes_per_row=1024, rows=10)
    10
    """
    if bytes_per_row < 1 or rows < 1:
        raise ValueError(f"bytes_per_row={bytes_per_row} and rows={rows} must be positive")
    most = max(1, target // bytes_per_row)
    even = -(-rows // -(-rows // most))
    whole_pages = _PAGE_BYTES // math.gcd(_PAGE_BYTES, bytes_per_row)
    aligned = -(-even // whole_pages) * whole_pages
    filled_up = -rows % aligned
    return aligned if aligned <= min(most, rows) and filled_up * 32 <= rows else even


def _corrupt(problems: list[str]) -> CraftError:
    shown = problems[:_PROBLEMS_SHOWN]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    return CraftError("Cache manifest is not valid.", why="; ".join(shown) + ".", fix=_REBUILD)


def _too_long(value: Any, name: str) -> list[str]:
    """Problems with fields that are longer than craft writes them; their content is not shown."""
    if isinstance(value, str | list | Mapping) and len(value) > _LONGEST_TEXT:
        return [f"field {name} has a length of {len(value)}, more than {_LONGEST_TEXT}"]
    if isinstance(value, Mapping):
        if any(len(str(key)) > _LONGEST_TEXT for key in value):
            return [f"the name of a field{f' of {name}' if name else ''} is too long"]
        parts = [(f"{name}.{key}".removeprefix("."), entry) for key, entry in value.items()]
    else:
        entries = value if isinstance(value, list) else []
        parts = [(f"{name}[{i}]", entry) for i, entry in enumerate(entries)]
    return [problem for part, entry in parts for problem in _too_long(entry, part)]


def _check_version(version: Any) -> bool:
    """Refuse a newer major version; return whether the minor version is newer than this one."""
    if version is None:
        raise _corrupt(["field format_version is missing"])
    parts = version.split(".") if isinstance(version, str) else []
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise _corrupt([f'field format_version is {version!r}, not "major.minor"'])
    major, minor = _numbers(version)
    newest = dict(map(_numbers, (UNPACKED_VERSION, FORMAT_VERSION)))
    if major > max(newest):
        raise CraftError(
            "Cache was written by a newer craft.",
            why=f"its format_version is {version}, this craft reads up to {max(newest)}.x.",
            fix="upgrade craft (pip install -U craftcli), or rebuild the cache with this one.",
        )
    return minor > newest.get(major, minor)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")
    return int(major), int(minor)


def _value_problems(manifest: Manifest) -> list[str]:
    problems = [
        f"field {name} is {getattr(manifest, name)}, not at least 1"
        for name in ("rows", "rows_per_chunk", "layer_count", "vectors", "dim")
        if getattr(manifest, name) < 1
    ]
    choices: list[tuple[str, str, tuple[str, ...]]]
    choices = [("kinds", kind, KINDS) for kind in manifest.kinds]
    choices += [
        ("dtype", manifest.dtype, DTYPES),
        ("images", manifest.images, IMAGES),
        ("sampling", manifest.sampling, SAMPLING),
    ]
    if manifest.actions is not None:
        choices.append(("actions", manifest.actions, ACTIONS))
    if manifest.layout is not None:
        choices.append(("layout", manifest.layout, LAYOUTS))
    problems += [
        f"field {name} has {value!r}, not one of {', '.join(allowed)}"
        for name, value, allowed in choices
        if value not in allowed
    ]
    if not manifest.kinds:
        problems.append("field kinds is empty")
    if manifest.datasets is not None and len(manifest.datasets) < 2:
        problems.append(f"field datasets has {len(manifest.datasets)} entries, not two or more")
    if "hidden" in manifest.kinds and not manifest.layers:
        problems.append("field layers is empty")
    if len(set(manifest.layers)) < len(manifest.layers):
        problems.append(f"field layers repeats a layer: {list(manifest.layers)}")
    outside = [layer for layer in manifest.layers if not 0 <= layer < manifest.layer_count]
    if outside:
        problems.append(f"field layers has {outside}, not in 0..{manifest.layer_count - 1}")
    if not manifest.stack or "/" in manifest.stack:
        problems.append(f"field stack is {manifest.stack!r}, not a name without /")
    return problems
