"""Draws which source words a translation model attends to for each word of its translation.

Usage: %(prog)s checkpoints/lstm_gnmt_small/checkpoint_best.pt \\
           --text "A man in an orange hat starring at something." --output attention.png

The sentence is translated by beam search, and the attention is that of the best translation.
"""

import os

from rhhn_fairseq.cli.parsers import picture_parser
from rhhn_fairseq.errors import UsageError


def main(argv=None) -> None:
    parser = picture_parser("attention", __doc__)
    add = parser.add_argument
    add("checkpoint", help="checkpoint of a translation model")
    add("--text", required=True, help="the sentence to translate")
    add("--data", metavar="DIR", help="directory of the dictionaries (default: that of the training)")
    add(
        "--sentencepiece-model",
        metavar="FILE",
        help="sentencepiece model (default: pieces.model in the data directory)",
    )
    add("--beam", type=int, default=5, help="width of the beam (default: %(default)s)")
    args = parser.parse_args(argv)

    from rhhn_fairseq.inspection import attention, plotting
    from rhhn_fairseq.inspection.attention_picture import draw_attention

    plotting.check_picture("--output", args.output, [args.checkpoint])

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.cli.translation import SearchConfig, Translator
    from rhhn_fairseq.models.loading import load_translation_models

    loaded = load_translation_models([args.checkpoint], args.data, args.sentencepiece_model)
    translation, seen = Translator(loaded, SearchConfig(beam=args.beam)).attend(args.text)
    source, target, weights = attention.word_attention(seen)
    if max(len(source), len(target)) > attention.MOST_WORDS:
        raise UsageError(
            f"--text has {len(source)} words and its translation {len(target)}, a picture may have "
            f"{attention.MOST_WORDS}"
        )
    arrays = {"source": source, "target": target, "weights": weights, "weights_of_pieces": seen.weights}
    arrays |= {"source_pieces": seen.source, "target_pieces": seen.target}
    plotting.save(draw_attention(seen, args.title), args.output, arrays)
    print(translation.text)
    print(f"written: {args.output} and {os.path.splitext(args.output)[0]}.npz")
