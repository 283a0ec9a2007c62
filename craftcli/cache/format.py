"""The cache format, version 1.1: what a craft cache is, apart from how it is written.

A cache is a Zarr v3 group in a folder. Every array but `commit` and `stats/` has the row axis first
and `rows_per_chunk` rows to a chunk, all other axes whole, so that chunk `k` holds the same rows in
every array. The codecs are `bytes` (little endian) and `crc32c`: a chunk file is its raw rows, then
four bytes of checksum. The last chunk is padded with zeros to full length, and chunks of zeros are
written like any other. N is the number of rows, V of vectors a row, D their width.

    array                     shape      dtype
    hidden/<stack>.<layer>    [N, V, D]  float32, float16, or bfloat16 kept as uint16 with the
                                         array attribute {"craft_dtype": "bfloat16"}
    hidden_mask               [N, V]     bool, true where a vector is a target
    inputs/<key>              [N, ...]   any fixed-width dtype: the model inputs the teacher saw;
                                         uint8 with the attribute {"craft_scale": "1/255"} stands
                                         for float32 images; none when `images` is "reference"
    outputs/labels            [N, S]     int64 or int32, token ids the teacher gave, -100 where
                                         nothing is to be predicted
    outputs/prediction        [N, S, D'] float32, what the teacher predicted: actions, velocities
                                         or noise
    outputs/top_tokens        [N, S, K]  int32, the K tokens the teacher held most likely
    outputs/top_logprobs      [N, S, K]  float32, their log-probabilities over all tokens
    outputs/mask              [N, S]     bool, true where a prediction is a target
    index/dataset_index       [N]        int64, index of the frame in the dataset
    index/episode             [N]        int64
    index/frame               [N]        int64, index of the frame in its episode
    index/task                [N]        int64 into the group attribute "tasks"
    valid                     [N]        bool
    commit                    [chunks]   uint32, one to a chunk
    stats/<stack>.<layer>/    mean [V, D] float64, variance [V, D] float64, count [V] int64

`hidden/`, `hidden_mask` and `stats/` are there when `kinds` has "hidden"; without it `layers` is
empty and `vectors` and `dim` are 1. `outputs/labels` is there when it has "token_ce". With "action"
there are `outputs/mask` and either `outputs/prediction` or, from a policy that predicts tokens,
`outputs/top_tokens` and `outputs/top_logprobs`. An empty
digest or fingerprint means unknown (an imported cache); a dataset fingerprint that starts with
`mixed:` means rows of several datasets. The group attributes are
"craft", the manifest below; "arrays", the row shape, dtype and attributes of each array with a row
axis, so that a lost array is noticed; "tasks", a list of task strings; and "digest", the sha256 of
the canonical JSON of these three without `complete`, so that a changed word is noticed.

A row is valid where `valid` is true: the teacher was run on it, its inputs and index are complete,
and every vector that `hidden_mask` lets through, and every output, is finite. Other rows hold their
place only, and nobody may rely on their contents. `stats` covers the let-through vectors of valid
rows.

`commit[k]` is the crc32c of the checksums (the last four bytes) of the files of chunk `k`, over all
arrays with a row axis in the order of their sorted names, and 1 if that is 0. It is written after
those files are on disk; 0 means that the chunk is not there. `complete` turns true after the last.

Versions are "major.minor". A reader refuses a newer major version and reads older ones; a newer
minor version may only add manifest fields and arrays, which older readers leave alone. Added in
1.1: the manifest fields `actions` and `layout`, and the arrays of the kind "action".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from craftcli.cache.records import read_record, record_to_json
from craftcli.errors import CraftError

FORMAT_VERSION = "1.1"
KINDS = ("hidden", "token_ce", "action")
DTYPES = ("float32", "float16", "bfloat16")
IMAGES = ("reference", "embedded")
SAMPLING = ("uniform", "per_episode", "per_task", "indices")
ACTIONS = ("teacher", "data")
LAYOUTS = ("bsd", "sbd", "bds", "bd")
LABELS = "outputs/labels"
OUTPUT_MASK = "outputs/mask"
PREDICTION = "outputs/prediction"
TOP_TOKENS = "outputs/top_tokens"
TOP_LOGPROBS = "outputs/top_logprobs"
IGNORED_LABEL = -100
CHUNK_BYTES = 16 * 1024**2

_REBUILD = "restore the file from a copy, or rebuild it with craft cache build --overwrite."


@dataclass(frozen=True, kw_only=True)
class TeacherIdentity:
    """Which frozen policy the hidden states came from."""

    source: str
    """Hub repository or folder the teacher was loaded from."""
    revision: str | None
    """Revision asked for on the Hub; null for its default, or for a folder."""
    policy_type: str
    """LeRobot's name of the policy family, such as pi0_fast."""
    weights_digest: str
    """Digest of the weights."""
    config_digest: str
    """Digest of the policy configuration."""
    processor_digest: str
    """Digest of the processors, with their normalisation statistics."""
    dtype: str
    """Dtype the teacher computed in."""


@dataclass(frozen=True, kw_only=True)
class DatasetIdentity:
    """Which samples the teacher was run on."""

    repo_id: str
    """Name of the LeRobot dataset."""
    root: str | None
    """Folder it was read from."""
    revision: str | None
    """Commit or tag on the Hub; null for a local dataset."""
    fingerprint: str
    """Digest of the dataset's features and sizes, and of some of its rows."""
    episodes: int
    """Episodes in the whole dataset."""
    frames: int
    """Frames in the whole dataset."""
    selection_digest: str
    """Digest of the dataset indices that were selected as rows."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that must match for a cache to be usable, under the group attribute "craft"."""

    format_version: str = FORMAT_VERSION
    """Version of this format, "major.minor"."""
    kinds: tuple[str, ...] = ("hidden",)
    """What the rows can be retained by: any of hidden, token_ce, action."""
    complete: bool
    """Whether every row was written."""
    rows: int
    """Rows in every array, valid or not."""
    rows_per_chunk: int
    """Rows in every chunk but the last, in every array."""
    stack: str
    """The layer stack of the policy that was recorded: a family's name, or a path with dots."""
    layout: str | None = None
    """How states lie that were found by their path: bsd, sbd, bds or bd; null for a name."""
    layers: tuple[int, ...]
    """Recorded layers, counted from 0 (negative numbers already resolved)."""
    layer_count: int
    """Depth of the stack."""
    pooling: str
    """How token positions became vectors."""
    vectors: int
    """Vectors a row has in each layer."""
    dim: int
    """Width of a vector."""
    dtype: str
    """Dtype of the hidden states: float32, float16 or bfloat16."""
    images: str
    """Where the images are: "embedded" under inputs/, or in the dataset ("reference")."""
    sampling: str
    """How the rows were selected: uniform, per_episode, per_task or indices."""
    prompts_digest: str | None
    """Digest of the instructions that replaced the dataset's own; null when none did."""
    actions: str | None = None
    """Whose actions went into a policy that takes some: "teacher" or "data"; null if unknown."""
    seed: int
    """Seed of the sample selection, and of what the policy draws at random."""
    teacher: TeacherIdentity
    """The policy that made the hidden states."""
    dataset: DatasetIdentity
    """The samples they were made on."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the packages that built the cache."""

    def __post_init__(self) -> None:
        problems = _value_problems(self)
        if problems:
            raise _corrupt(problems)

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
        """As plain JSON values; `from_json` reads it back."""
        return record_to_json(self)

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Check and read a manifest; names every field that is missing, unknown or ill-typed."""
        if not isinstance(data, Mapping):
            raise _corrupt([f"it is {type(data).__name__}, not an object"])
        newer_minor = _check_version(data.get("format_version"))
        problems: list[str] = []
        manifest = read_record(cls, data, problems, allow_unknown=newer_minor)
        if problems or manifest is None:
            raise _corrupt(problems)
        return manifest


def layer_names(manifest: Manifest) -> list[str]:
    """Array names after `hidden/` and `stats/`, in the order of the manifest's layers."""
    return [f"{manifest.stack}.{layer}" for layer in manifest.layers]


def rows_per_chunk(bytes_per_row: int, rows: int, target: int = CHUNK_BYTES) -> int:
    """How many rows of the widest array make a chunk of about `target` bytes.

    >>> rows_per_chunk(bytes_per_row=1024, rows=100_000)
    16384
    >>> rows_per_chunk(bytes_per_row=1024, rows=10)
    10
    """
    if bytes_per_row < 1 or rows < 1:
        raise ValueError(f"bytes_per_row={bytes_per_row} and rows={rows} must be positive")
    return max(1, min(rows, target // bytes_per_row))


def _corrupt(problems: list[str]) -> CraftError:
    return CraftError("Cache manifest is not valid.", why="; ".join(problems) + ".", fix=_REBUILD)


def _check_version(version: Any) -> bool:
    """Refuse a newer major version; return whether the minor version is newer than this reader."""
    if version is None:
        raise _corrupt(["field format_version is missing"])
    parts = version.split(".") if isinstance(version, str) else []
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise _corrupt([f'field format_version is {version!r}, not "major.minor"'])
    major, minor = map(int, parts)
    own_major, own_minor = map(int, FORMAT_VERSION.split("."))
    if major > own_major:
        raise CraftError(
            "Cache was written by a newer craft.",
            why=f"its format_version is {version}, this craft reads up to {own_major}.x.",
            fix="upgrade craft (pip install -U craftcli), or rebuild the cache with this one.",
        )
    return major == own_major and minor > own_minor


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
