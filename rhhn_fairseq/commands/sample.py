"""Draws text from a character language model and prints it as it comes.

Usage: %(prog)s checkpoints/checkpoint_best.pt --prompt "The " --length 300
"""

from itertools import islice

from rhhn_fairseq.commands.parsers import make_parser
from rhhn_fairseq.errors import UsageError


def main(argv=None) -> None:
    parser = make_parser("sample", __doc__)
    parser.add_argument("checkpoint", help="checkpoint of a character language model")
    parser.add_argument("--data", help="its data directory (default: where it was trained)")
    parser.add_argument("--prompt", default="", help="text the model reads first; it is printed as well")
    parser.add_argument("--length", type=int, default=300, help="characters to draw (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest (default: 1)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest only (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.length < 1:
        raise UsageError(f"--length {args.length} is too small, the smallest is 1")

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.models.loading import load_char_lm
    from rhhn_fairseq.search.sampling import SamplingConfig, generate

    config = SamplingConfig(args.temperature, args.top_k, args.seed)
    model, task = load_char_lm(args.checkpoint, args.data)
    prompt = task.encode_prompt(args.prompt)
    decoder = task.vocabulary.incremental_decoder()
    print(args.prompt, end="", flush=True)
    for entry in islice(generate(model, prompt, config), args.length):
        print(decoder.feed([entry]), end="", flush=True)
    print(decoder.finish())
