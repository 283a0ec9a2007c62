"""The demo's two tokenizers, built without a download: words for prompts, FAST for actions."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct, idct
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.trainers import BpeTrainer
from transformers import AutoProcessor, PreTrainedTokenizerFast
from transformers.processing_utils import ProcessorMixin

VOCAB_SIZE = 512
"""Words count up from 0, action tokens down (LeRobot maps FAST id i to VOCAB_SIZE - 1 - i)."""

SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>")


def build_text_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """A word-level tokenizer that knows `words`, numbers up to 255 and punctuation."""
    known = [*SPECIALS, "Action", "Task", "State", ":", ",", ";", "|", *sorted(set(words))]
    known += [str(n) for n in range(256)]
    vocab = {word: i for i, word in enumerate(known)}
    vocab |= {f"<action_{i}>": i for i in range(len(known), VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"\w+|[^\w\s]"), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
    )


class FastActionTokenizer(ProcessorMixin):  # type: ignore[misc]  # transformers ships no types
    """FAST: a discrete cosine transform of the action chunk, rounded, then byte-pair encoding.

    transformers 5 saves and loads the attribute only if it is called `tokenizer`; LeRobot's
    pi0_fast reads `bpe_tokenizer`.
    """

    attributes: ClassVar[list[str]] = ["tokenizer"]
    tokenizer_class = "AutoTokenizer"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        scale: float = 4.0,
        min_token: int = 0,
        time_horizon: int = 4,
        action_dim: int = 2,
    ) -> None:
        super().__init__(tokenizer)
        self.scale = scale
        self.min_token = min_token
        self.time_horizon = time_horizon
        self.action_dim = action_dim

    @property
    def bpe_tokenizer(self) -> PreTrainedTokenizerFast:
        """The same tokenizer under LeRobot's name."""
        return self.tokenizer

    def __call__(self, actions: Any) -> list[list[int]]:
        """The token ids of each chunk in `actions` [batch, horizon, dim]."""
        texts = [
            _as_text(coefficients, self.min_token)
            for coefficients in _coefficients(np.asarray(actions), self.scale)
        ]
        return [self.tokenizer(text)["input_ids"] for text in texts]

    def decode(self, tokens: list[list[int]]) -> NDArray[np.float64]:
        """The action chunks [batch, horizon, dim] of these token ids."""
        chunks = []
        for ids in tokens:
            text = self.tokenizer.decode(ids)
            flat = np.array([ord(c) for c in text]) + self.min_token
            chunks.append(flat.reshape(self.time_horizon, self.action_dim))
        return np.asarray(idct(np.stack(chunks) / self.scale, axis=1, norm="ortho"))


def build_action_tokenizer(
    chunks: NDArray[np.floating[Any]], *, scale: float, vocab_size: int
) -> FastActionTokenizer:
    """Fit the byte-pair encoding to normalised action chunks [n, horizon, dim]."""
    coefficients = _coefficients(chunks, scale)
    low, high = int(coefficients.min()), int(coefficients.max())
    alphabet = [chr(i) for i in range(high - low + 1)]
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    bpe.decoder = ByteLevelDecoder()
    bpe.post_processor = ByteLevelProcessor(trim_offsets=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        initial_alphabet=alphabet,
        special_tokens=[],
        max_token_length=10_000,
        show_progress=False,
    )
    bpe.train_from_iterator((_as_text(c, low) for c in coefficients), trainer=trainer)
    return FastActionTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False),
        scale=scale,
        min_token=low,
        time_horizon=chunks.shape[1],
        action_dim=chunks.shape[2],
    )


def _coefficients(chunks: NDArray[np.floating[Any]], scale: float) -> NDArray[np.int64]:
    return np.asarray(np.around(dct(chunks, axis=1, norm="ortho") * scale), dtype=np.int64)


def _as_text(coefficients: NDArray[np.int64], low: int) -> str:
    return "".join(chr(max(int(c) - low, 0)) for c in coefficients.flatten())


def register_action_tokenizer() -> None:
    """Let AutoProcessor find the FAST tokenizer by its name, so that no remote code is needed."""
    AutoProcessor.register(FastActionTokenizer.__name__, FastActionTokenizer, exist_ok=True)


def tokenizer_folders(root: Path) -> tuple[Path, Path]:
    """The folders of the text and the action tokenizer inside the teacher's folder."""
    return root / "text_tokenizer", root / "action_tokenizer"
