"""The values that settings choose from, by name. No heavy imports, so that `--help` is quick."""

from enum import StrEnum

IGNORED_LABEL = -100
"""Label of a position without a loss, as in PyTorch's cross-entropy."""


class Mode(StrEnum):
    """What a run retains of the teacher."""

    HIDDEN = "hidden"
    ACTION = "action"
    TOKEN_CE = "token_ce"
    REPLAY = "replay"
    L2SP = "l2sp"
    EWC = "ewc"
    NONE = "none"


class Kind(StrEnum):
    """What a cache stores of its teacher, for the modes of the same names."""

    HIDDEN = "hidden"
    ACTION = "action"
    TOKEN_CE = "token_ce"


class ActionSource(StrEnum):
    """Which actions the teacher gets as input, for policies that take actions as input."""

    TEACHER = "teacher"
    DATA = "data"


class Constraints(StrEnum):
    """Whether several modes share one budget and one multiplier, or have one of each per mode."""

    JOINT = "joint"
    EACH = "each"


class OutputKind(StrEnum):
    """What a policy family predicts."""

    TOKENS = "tokens"
    VECTORS = "vectors"


class Pooling(StrEnum):
    """Which tokens of a layer a cache stores, and whether it averages them."""

    MEAN_IMAGE_TOKENS = "mean_image_tokens"
    MEAN_MASKED = "mean_masked"
    LAST_TOKEN = "last_token"
    CLS_TOKEN = "cls_token"
    VISION_TEXT = "vision_text"
    MEAN_ACTION_TOKENS = "mean_action_tokens"
    ACTION_TOKENS = "action_tokens"


class Layout(StrEnum):
    """The axes of a layer's hidden states, in order: B the batch, S the tokens, D the features."""

    BSD = "bsd"
    SBD = "sbd"
    BDS = "bds"
    BD = "bd"


class Anchors(StrEnum):
    """Where a run takes its anchors from: what there is, or a cache that was built before."""

    AUTO = "auto"
    CACHE = "cache"


class Teacher(StrEnum):
    """Whether the teacher's answers are read from a cache, or asked for at every step."""

    CACHED = "cached"
    LIVE = "live"


class AnchorSource(StrEnum):
    """What a run makes its own anchors of."""

    OLD_FRAMES = "old_frames"
    STATISTICS = "statistics"
    OLD_INSTRUCTIONS = "old_instructions"
    ENVIRONMENT = "environment"


class Images(StrEnum):
    """Where the images of a cache are: in their dataset, or embedded in the cache."""

    REFERENCE = "reference"
    EMBED = "embed"


class Stats(StrEnum):
    """Which statistics normalise the data: the teacher's, these widened, or the dataset's."""

    WIDEN = "widen"
    TEACHER = "teacher"
    DATASET = "dataset"


class Sampling(StrEnum):
    """How anchors are drawn: uniformly over frames, or evenly over episodes, tasks or phases.

    The phase of a frame is its place in its episode, from the beginning to the end.
    """

    UNIFORM = "uniform"
    PER_EPISODE = "per_episode"
    PER_TASK = "per_task"
    PER_PHASE = "per_phase"


class StoreDtype(StrEnum):
    """The precision of stored hidden states; `auto` is the teacher's own, which loses nothing."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class LossKind(StrEnum):
    """The distance between the student's hidden states, or action vectors, and the teacher's."""

    NMSE = "nmse"
    MSE = "mse"
    L1 = "l1"
    COSINE = "cosine"


class Merge(StrEnum):
    """How the retention gradient and the task gradient are merged.

    The choices from `upgrad` on are TorchJD's. They compute weights from both gradients and replace
    the projection.
    """

    WEIGHTED = "weighted"
    EQUAL = "equal"
    TASK_PRIORITY = "task_priority"
    UPGRAD = "upgrad"
    DUALPROJ = "dualproj"
    MGDA = "mgda"
    CAGRAD = "cagrad"
    ALIGNED_MTL = "aligned_mtl"
    IMTL_G = "imtl_g"

    @property
    def replaces_projection(self) -> bool:
        """Whether it resolves conflicts itself, so that nothing is projected."""
        return self not in (Merge.WEIGHTED, Merge.EQUAL, Merge.TASK_PRIORITY)


class SurgeryScope(StrEnum):
    """The parameters that share one decision to project; `none` never projects."""

    GLOBAL = "global"
    PER_LAYER = "per_layer"
    PER_GROUP = "per_group"
    NONE = "none"


class ProjectWhen(StrEnum):
    """When the task gradient is projected: in every conflict, or only while L_ret is above ε."""

    CONFLICT = "conflict"
    VIOLATED = "violated"


class Controller(StrEnum):
    """How λ follows the violation of the budget: gradient ascent, or a νPI controller."""

    ASCENT = "ascent"
    NUPI = "nupi"


class Schedule(StrEnum):
    """How the budget ε changes over the run; `auto` finds a constant one in the first steps."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    EXPONENTIAL = "exponential"
    AUTO = "auto"


class LrSchedule(StrEnum):
    """How the learning rate changes: by the policy's preset, not at all, or in a cosine to 0."""

    PRESET = "preset"
    CONSTANT = "constant"
    COSINE = "cosine"


class Amp(StrEnum):
    """A lower precision for forward passes; `off` keeps the policy's own."""

    OFF = "off"
    BF16 = "bf16"
    FP16 = "fp16"


class Parallel(StrEnum):
    """How several processes share a policy: each has a copy (ddp), or a part of it (fsdp)."""

    DDP = "ddp"
    FSDP = "fsdp"


class Tracker(StrEnum):
    """A service that gets the metrics as well as the run's own file."""

    NONE = "none"
    WANDB = "wandb"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
