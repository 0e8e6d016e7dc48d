"""The second stage: a joint sentencepiece model of both languages."""

import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
from tqdm import tqdm

from rhhn_fairseq.files import LONGEST_LINE
from rhhn_fairseq.options import check_fields, option

MODEL_NAME = "pieces.model"
VOCABULARY_NAME = "pieces.vocab"
MODEL_TYPES = ("unigram", "bpe")

# Both lists begin with special symbols; fairseq's has <pad> besides <s>, </s> and <unk>.
_MORE_IN_FAIRSEQ = 1
# sentencepiece's sizes have 32 bits.
_LARGEST_SIZE = 10**9
# The result must not depend on the machine, so the number of threads does not either.
_THREADS = 4


@dataclass(frozen=True)
class PiecesConfig:
    """How pieces are learnt; ``UsageError`` names a value that cannot work."""

    vocab_size: int = option(
        32_000,
        help="entries of the joint dictionary, fairseq's four special ones included",
        low=5,
        high=_LARGEST_SIZE,
    )
    model_type: str = option("unigram", help="how pieces are learnt", choices=MODEL_TYPES)
    sample_sentences: int = option(
        500_000, help="learn from at most this many sentences, evenly spread over the text", low=2
    )
    character_coverage: float = option(0.9999, help="share of the text's characters that the pieces cover")
    split_digits: bool = option(False, help="every digit is a piece of its own")

    def __post_init__(self):
        check_fields(self, flags=True)


def train_pieces(texts: list[Path], pairs: int, config: PiecesConfig, folder: Path) -> dict:
    """Learns the pieces and writes pieces.model and pieces.vocab into ``folder``.

    texts: the training text of the two languages, ``pairs`` lines each.

    Of a text that is too small for ``vocab_size``, the pieces are as many as it has.

    Returns the number of sentences that were learnt from. Raises RuntimeError if the text has too many
    characters for ``vocab_size``.
    """
    take = min(pairs, config.sample_sentences // 2)
    try:
        model = _learn(_sample(texts, pairs, take), config, exact=True)
    except RuntimeError:
        model = _learn(_sample(texts, pairs, take), config, exact=False)
    (folder / MODEL_NAME).write_bytes(model)
    processor = load_pieces(folder)
    with (folder / VOCABULARY_NAME).open("w", encoding="utf-8", newline="\n") as file:
        for index in range(processor.vocab_size()):
            file.write(f"{processor.id_to_piece(index)}\t{processor.get_score(index):g}\n")
    return {"sentences": 2 * take}


def _learn(sentences: Iterator[str], config: PiecesConfig, exact: bool) -> bytes:
    """Returns a sentencepiece model of ``vocab_size``; unless ``exact``, of a smaller one if need be."""
    model = io.BytesIO()
    _call_in_thread(
        sentencepiece.SentencePieceTrainer.train,
        sentence_iterator=sentences,
        model_writer=model,
        vocab_size=config.vocab_size - _MORE_IN_FAIRSEQ,
        # The model stores the options that are given, so those of earlier versions have no other.
        **({} if exact else {"hard_vocab_limit": False}),
        model_type=config.model_type,
        character_coverage=config.character_coverage,
        split_digits=config.split_digits,
        max_sentence_length=LONGEST_LINE,
        num_threads=_THREADS,
        minloglevel=2,
    )
    return model.getvalue()


def _call_in_thread(function: Callable, **options) -> None:
    """Calls a C++ function in a thread, so that Ctrl-C and SIGTERM are handled before it returns."""
    raised = []

    def call():
        try:
            function(**options)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def load_pieces(folder: Path) -> sentencepiece.SentencePieceProcessor:
    """Loads the sentencepiece model in a folder. Raises OSError, or RuntimeError if it is none."""
    processor = sentencepiece.SentencePieceProcessor()
    # Given to the constructor, an empty model would be no error.
    processor.LoadFromSerializedProto((folder / MODEL_NAME).read_bytes())
    return processor


def _sample(texts: list[Path], pairs: int, take: int) -> Iterator[str]:
    """Yields ``take`` of the pairs, at even distances, source and target in turn."""
    source, target = texts
    with source.open("rb") as source_file, target.open("rb") as target_file:
        both = zip(source_file, target_file, strict=True)
        for number, lines in enumerate(tqdm(both, desc="sampling", total=pairs, unit="pair", disable=None)):
            if (number + 1) * take // pairs > number * take // pairs:
                yield from (line.decode("utf-8").removesuffix("\n") for line in lines)
