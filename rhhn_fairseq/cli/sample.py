"""Samples text from a character language model, and prints each symbol as it is drawn.

Usage: %(prog)s checkpoints/checkpoint_best.pt --prompt "The " --length 300
       %(prog)s --pretrained --prompt "def "

With --weights the complete text is read once more, to draw how much the model's weights change at each
character, as a page that shows the numbers (.html) or as a picture (.png, .svg).

A model that was trained with --reverse samples what comes before the prompt. Its text is printed when it is
complete.
"""

from itertools import islice

from rhhn_fairseq.cli.character_models import add_model, check_model, load
from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError


def main(argv=None) -> None:
    parser = make_parser("sample", __doc__)
    add_model(parser)
    parser.add_argument("--prompt", default="", help="text that the model reads first; it is printed too")
    parser.add_argument("--length", type=int, default=300, help="characters to sample (default: %(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="divides the logits; 0: always take the likeliest (default: 1)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="sample from the k likeliest only (default: all)"
    )
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="draw how the weights change: .html, .png or .svg; its arrays go beside it as .npz",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the samples (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.length < 1:
        raise UsageError(f"--length {args.length} is too small, the smallest is 1")
    check_model(args)

    from rhhn_fairseq.data.text.words import prompt_indices
    from rhhn_fairseq.generate.characters import SamplingConfig, generate

    config = SamplingConfig(args.temperature, args.top_k, args.seed)
    if args.weights is not None:
        from rhhn_fairseq.inspection.pictures import save_reading
        from rhhn_fairseq.inspection.plotting import check_picture
        from rhhn_fairseq.inspection.tracing import check_length
        from rhhn_fairseq.inspection.weights import read_text

        check_picture("--weights", args.weights, [args.checkpoint], page=True)
    model, vocabulary = load(args.checkpoint, args.data)
    prompt = prompt_indices(vocabulary, args.prompt)
    entries = list(prompt)
    if args.weights is not None:
        check_length(len(prompt) - 1 + args.length)
    decoder = vocabulary.incremental_decoder()
    print(decoder.feed(prompt[1:]), end="", flush=True)
    for entry in islice(generate(model, prompt, config), args.length):
        print(decoder.feed([entry]), end="", flush=True)
        entries.append(entry)
    print(decoder.finish())
    if args.weights is not None:
        save_reading(read_text(model, vocabulary, entries), args.weights)
