"""Draws text from a character language model and prints it as it comes.

Usage: %(prog)s checkpoints/checkpoint_best.pt --prompt "The " --length 300
       %(prog)s --pretrained --prompt "def "
"""

import os
from itertools import islice

from rhhn_fairseq.commands.parsers import make_parser
from rhhn_fairseq.errors import UsageError


def main(argv=None) -> None:
    parser = make_parser("sample", __doc__)
    parser.add_argument(
        "checkpoint", nargs="?", help="checkpoint of a language model, or a directory of `rhhn export`"
    )
    parser.add_argument(
        "--pretrained", action="store_true", help="the model of Python source code that the package has"
    )
    parser.add_argument("--data", help="its data directory (default: where it was trained)")
    parser.add_argument("--prompt", default="", help="text the model reads first; it is printed as well")
    parser.add_argument("--length", type=int, default=300, help="characters to draw (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest (default: 1)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest only (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.length < 1:
        raise UsageError(f"--length {args.length} is too small, the smallest is 1")
    if args.pretrained == (args.checkpoint is not None):
        raise UsageError("give either a checkpoint or --pretrained")
    if args.pretrained and args.data is not None:
        raise UsageError("--data goes with a checkpoint, not with --pretrained")

    from rhhn_fairseq.data.text.prompt import prompt_indices
    from rhhn_fairseq.search.sampling import SamplingConfig, generate

    config = SamplingConfig(args.temperature, args.top_k, args.seed)
    model, vocabulary = load(args)
    prompt = prompt_indices(vocabulary, args.prompt)
    decoder = vocabulary.incremental_decoder()
    print(decoder.feed(prompt[1:]), end="", flush=True)
    for entry in islice(generate(model, prompt, config), args.length):
        print(decoder.feed([entry]), end="", flush=True)
    print(decoder.finish())


def load(args):
    """The network and its symbols; fairseq is imported for its own checkpoints only."""
    if args.pretrained or os.path.isdir(args.checkpoint):
        from rhhn_fairseq.networks.files import load_characters, packaged

        loaded = load_characters(packaged("characters") if args.pretrained else args.checkpoint)
        return loaded.network, loaded.vocabulary

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.models.loading import load_char_lm

    model, task = load_char_lm(args.checkpoint, args.data)
    return model, task.vocabulary
