"""A word-level tokenizer for the prompts of the tiny vision-language policies."""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tiny.world import TASKS

SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>")
PUNCTUATION = (":", ",", ";", "\n")


def text_tokenizer(tasks: Sequence[str] = TASKS, **markers: str) -> PreTrainedTokenizerFast:
    """Knows the tasks' words and the numbers below 256; `markers` are further special tokens."""
    words = sorted({word for task in tasks for word in task.split()})
    known = [*SPECIALS, *markers.values(), "Task", "State", "Action", *PUNCTUATION, *words]
    known += map(str, range(256))
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"\w+|\n|[^\w\s]"), behavior="removed", invert=True)
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", known.index("<bos>"))]
    )
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), SPECIALS, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **names, extra_special_tokens=markers
    )
