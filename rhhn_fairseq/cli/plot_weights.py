"""Draws how much the weights of a character model change at each symbol of a text.

Usage: %(prog)s checkpoints/checkpoint_best.pt --file page.txt --output weights.html
       %(prog)s --pretrained --text "def main(argv):" --output weights.png

The measure is the L2 norm of the difference between a recurrent matrix, as the hypernetwork scales it, in
this step and in the step before (Ha, Dai, Le 2016, figure 3). A page (.html) shows the numbers of each
symbol, the probabilities of the next symbol, and the one that followed. `rhhn sample --weights` draws this
for a text that the model samples.
"""

import os

from rhhn_fairseq.cli.character_models import add_model, add_text, check_model, given_text, load
from rhhn_fairseq.cli.parsers import make_parser


def main(argv=None) -> None:
    parser = make_parser("plot weights", __doc__)
    add_model(parser)
    add_text(parser)
    parser.add_argument("--title", help="title of the page or picture")
    parser.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="page (.html) or picture (.png, .svg); its arrays go beside it as .npz",
    )
    args = parser.parse_args(argv)
    check_model(args)

    from rhhn_fairseq.data.text.words import prompt_indices
    from rhhn_fairseq.inspection.reading_files import TITLE, check_reading, save_reading
    from rhhn_fairseq.inspection.weights import read_text

    check_reading("--output", args.output, (args.checkpoint, args.file))
    text = given_text(args)
    model, vocabulary = load(args.checkpoint, args.data)
    reading = read_text(model, vocabulary, prompt_indices(vocabulary, text, args.file or "--text"))
    save_reading(reading, args.output, args.title or TITLE)
    print(f"written: {args.output} and {os.path.splitext(args.output)[0]}.npz")
