"""Penn Treebank's two character texts: the raw one, and the one without the outer spaces of lines."""

import numpy as np

from rhhn_fairseq.data.text.lines import outer_spaces
from rhhn_fairseq.data.text.vocabulary import EOS, CharVocabulary


def is_raw_ptb(manifest: dict | None) -> bool:
    """Whether a directory with this manifest holds PTB's raw variant."""
    request = {} if manifest is None else manifest["request"]
    options = request.get("options")
    return request.get("corpus") == "ptb" and isinstance(options, dict) and options.get("variant") == "raw"


def char_symbols(stream: np.ndarray, vocabulary: CharVocabulary) -> int:
    """Returns the number of symbols of a raw text, dictionary indices [N], in the char variant."""
    space = int(vocabulary.encode(" ")[0])
    return len(stream) - int(np.count_nonzero(outer_spaces(stream, space, EOS)))
