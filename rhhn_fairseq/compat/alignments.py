"""--replace-unk: replaces unknown words of a translation with the source words they are aligned with."""

from rhhn_fairseq.compat import in_place_of
from rhhn_fairseq.errors import UsageError

# The value that fairseq's parser gives --replace-unk without a file.
NO_FILE = "@@ "


def replace_unknown_by_alignment() -> bool:
    """`utils.replace_unk` expects one source position per target word, which no generator returns any more.

    Since fairseq 0.10 alignments are pairs (source, target), and empty without --print-alignment, so the
    first unknown word ends the program with an IndexError or TypeError. Here pairs are read. Missing
    alignments, or pieces that are joined before the replacement, end in a one-line error. Without a file
    the option has the value "@@ ", which belongs to another option, and fairseq tries to open that as a file.
    """
    from fairseq import utils

    @in_place_of(utils, "load_align_dict")
    def load_align_dict(load, replace_unk):
        return {} if replace_unk == NO_FILE else load(replace_unk)

    @in_place_of(utils, "post_process_prediction")
    def post_process_prediction(
        process_prediction, hypo_tokens, src_str, alignment, align_dict, tgt_dict, remove_bpe=None, **rest
    ):
        if align_dict is not None and remove_bpe is not None:
            raise UsageError(
                f"--replace-unk works on pieces, and --post-process {remove_bpe} joins them first; leave it "
                "out and join the pieces of the output afterwards"
            )
        return process_prediction(
            hypo_tokens, src_str, alignment, align_dict, tgt_dict, remove_bpe=remove_bpe, **rest
        )

    utils.replace_unk = replace_unk
    return True


def replace_unk(hypo_str: str, src_str: str, alignment, align_dict: dict, unk: str) -> str:
    """Returns the translation with each unknown word replaced by the source word it is aligned with.

    Args:
        alignment: pairs (source position, target position), each target position at most once.
        align_dict: translations of source words; a word that is not in it is copied.

    Raises:
        UsageError: there is an unknown word but no alignment.
    """
    words, source = hypo_str.split(), src_str.split()
    if unk in words and len(alignment) == 0:
        raise UsageError("--replace-unk needs alignments: give --print-alignment as well")
    position = {target: where for where, target in alignment}
    for i, word in enumerate(words):
        if word == unk and position.get(i, len(source)) < len(source):
            words[i] = align_dict.get(source[position[i]], source[position[i]])
    return " ".join(words)
