"""What a language model reads first: the beginning of a text, and a prompt."""

from rhhn_fairseq.data.text.vocabulary import EOS, UNK, CharVocabulary
from rhhn_fairseq.data.text.words import WordVocabulary
from rhhn_fairseq.errors import UsageError


def first_input(vocabulary: CharVocabulary | WordVocabulary) -> int:
    """Returns the index read before a text, from either side: the newline's, or <unk> if none occurs."""
    return EOS if vocabulary.newline_occurs else UNK


def prompt_indices(
    vocabulary: CharVocabulary | WordVocabulary, text: str, name: str = "--prompt"
) -> list[int]:
    """Returns dictionary indices of a text to continue, in the model's reading order, after ``first_input``.

    If the vocabulary has ``reverse``, the text is the end of a longer one, and its last symbol comes first.

    Args:
        name: what the message calls the text.

    Raises:
        UsageError: a symbol of it is not in the vocabulary.
    """
    symbols, entries = vocabulary.split(text), vocabulary.encode(text).tolist()
    unknown = sorted({symbol for symbol, entry in zip(symbols, entries, strict=True) if entry == UNK})
    if unknown:
        raise UsageError(f"{name} has symbols the model does not know: {unknown[:8]}")
    return [first_input(vocabulary), *(reversed(entries) if vocabulary.reverse else entries)]
