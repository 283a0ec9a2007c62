"""The named choices of the method, free of heavy imports so that `--help` stays quick."""

from enum import StrEnum


class Mode(StrEnum):
    """What holds the policy to its teacher."""

    HIDDEN = "hidden"
    NONE = "none"


class Pooling(StrEnum):
    """Which tokens of a layer are kept, and how."""

    MEAN_IMAGE_TOKENS = "mean_image_tokens"
    MEAN_MASKED = "mean_masked"
    LAST_TOKEN = "last_token"
    CLS_TOKEN = "cls_token"
    VISION_TEXT = "vision_text"
    MEAN_ACTION_TOKENS = "mean_action_tokens"
    ACTION_TOKENS = "action_tokens"


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
    """The distance between the student's hidden states and the teacher's."""

    NMSE = "nmse"
    MSE = "mse"
    L1 = "l1"
    COSINE = "cosine"


class Merge(StrEnum):
    """How the retention gradient is added to the task gradient."""

    WEIGHTED = "weighted"
    EQUAL = "equal"
    TASK_PRIORITY = "task_priority"


class Schedule(StrEnum):
    """How the budget ε moves from its start to its end over the run."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    EXPONENTIAL = "exponential"
