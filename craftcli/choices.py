"""The named choices of the method, free of heavy imports so that `--help` stays quick."""

from enum import StrEnum


class Mode(StrEnum):
    """What holds the policy to its teacher."""

    HIDDEN = "hidden"
    ACTION = "action"
    TOKEN_CE = "token_ce"
    REPLAY = "replay"
    L2SP = "l2sp"
    EWC = "ewc"
    NONE = "none"


class Kind(StrEnum):
    """What a cache stores of its teacher."""

    HIDDEN = "hidden"
    ACTION = "action"
    TOKEN_CE = "token_ce"


class ActionSource(StrEnum):
    """Whose actions the teacher is run over, where a policy takes actions in."""

    TEACHER = "teacher"
    DATA = "data"


class Constraints(StrEnum):
    """Whether several modes share one budget and multiplier, or have one each."""

    JOINT = "joint"
    EACH = "each"


class OutputKind(StrEnum):
    """What a policy family predicts."""

    TOKENS = "tokens"
    VECTORS = "vectors"


class Pooling(StrEnum):
    """Which tokens of a layer are kept, and how."""

    MEAN_IMAGE_TOKENS = "mean_image_tokens"
    MEAN_MASKED = "mean_masked"
    LAST_TOKEN = "last_token"
    CLS_TOKEN = "cls_token"
    VISION_TEXT = "vision_text"
    MEAN_ACTION_TOKENS = "mean_action_tokens"
    ACTION_TOKENS = "action_tokens"


class Layout(StrEnum):
    """How the states of a layer lie in a tensor: B rows of the batch, S tokens, D numbers each."""

    BSD = "bsd"
    SBD = "sbd"
    BDS = "bds"
    BD = "bd"


class Images(StrEnum):
    """Where a cache keeps its images: in the dataset they came from, or in itself."""

    REFERENCE = "reference"
    EMBED = "embed"


class Sampling(StrEnum):
    """How anchors are drawn from the dataset."""

    UNIFORM = "uniform"
    PER_EPISODE = "per_episode"
    PER_TASK = "per_task"


class StoreDtype(StrEnum):
    """How hidden states are stored; `auto` is the teacher's own precision, which loses nothing."""

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
    """How the retention gradient is added to the task gradient.

    From `upgrad` on they are TorchJD's: weights found from both gradients, in place of projection.
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


class SurgeryScope(StrEnum):
    """Over which parameters one decision to project is taken; `none` projects nowhere."""

    GLOBAL = "global"
    PER_LAYER = "per_layer"
    PER_GROUP = "per_group"
    NONE = "none"


class ProjectWhen(StrEnum):
    """In which conflicts the task gradient is projected."""

    CONFLICT = "conflict"
    VIOLATED = "violated"


class Controller(StrEnum):
    """How λ follows the violation of the budget."""

    ASCENT = "ascent"
    NUPI = "nupi"


class Schedule(StrEnum):
    """How the budget ε moves from its start to its end over the run, or that it is found in it."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    EXPONENTIAL = "exponential"
    AUTO = "auto"


class LrSchedule(StrEnum):
    """How the learning rate moves: as the policy's preset has it, not at all, or down to 0."""

    PRESET = "preset"
    CONSTANT = "constant"
    COSINE = "cosine"


class Amp(StrEnum):
    """Precision of forward passes, where it is lower than the policy's own."""

    OFF = "off"
    BF16 = "bf16"
    FP16 = "fp16"


class Parallel(StrEnum):
    """How several processes share a policy: a copy each, or each a part of it."""

    DDP = "ddp"
    FSDP = "fsdp"


class Tracker(StrEnum):
    """Where metrics go besides the run's own file."""

    NONE = "none"
    WANDB = "wandb"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
