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
    text = "sample from the fewest likeliest that have this probability together (default: all)"
    parser.add_argument("--top-p", type=float, default=1.0, help=text)
    parser.add_argument("--stop", metavar="TEXT", help="a sample ends with this text, or after --length")
    text = "samples, drawn at once and printed when all are complete (default: 1, printed as it is drawn)"
    parser.add_argument("--batch", type=int, default=1, metavar="N", help=text)
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="draw how the weights change: .html, .png or .svg; its arrays go beside it as .npz",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the samples (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("length", "batch"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)} is too small, the smallest is 1")
    if args.batch > 1 and args.weights is not None:
        raise UsageError("--weights draws one text; leave out --batch")
    check_model(args)

    from rhhn_fairseq.data.text.words import prompt_indices
    from rhhn_fairseq.generate.characters import SamplingConfig, generate

    config = SamplingConfig(args.temperature, args.top_k, args.top_p, args.seed)
    if args.weights is not None:
        from rhhn_fairseq.inspection.pictures import save_reading
        from rhhn_fairseq.inspection.plotting import check_picture
        from rhhn_fairseq.inspection.tracing import check_length
        from rhhn_fairseq.inspection.weights import read_text

        check_picture("--weights", args.weights, [args.checkpoint], page=True)
    model, vocabulary = load(args.checkpoint, args.data)
    prompt = prompt_indices(vocabulary, args.prompt)
    stop = prompt_indices(vocabulary, args.stop, "--stop")[1:] if args.stop else None
    if args.weights is not None:
        check_length(len(prompt) - 1 + args.length)
    texts, going = [list(prompt) for _ in range(args.batch)], set(range(args.batch))
    decoder = vocabulary.incremental_decoder()
    print(decoder.feed(prompt[1:]) if args.batch == 1 else "", end="", flush=True)
    for drawn in islice(generate(model, prompt, config, args.batch), args.length):
        for row in list(going):
            texts[row].append(drawn[row])
            if stop and texts[row][max(len(prompt), len(texts[row]) - len(stop)) :] == stop:
                going.remove(row)
        if args.batch == 1:
            print(decoder.feed(drawn), end="", flush=True)
        if not going:
            break
    if args.batch == 1:
        print(decoder.finish())
    for number, text in enumerate(texts if args.batch > 1 else (), 1):
        decoder = vocabulary.incremental_decoder()
        print(f"--- {number}\n{decoder.feed(text[1:])}{decoder.finish()}")
    if args.weights is not None:
        save_reading(read_text(model, vocabulary, texts[0]), args.weights)
