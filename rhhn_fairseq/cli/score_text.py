"""Scores a text file under a character language model: bits per character.

Usage: %(prog)s checkpoints/checkpoint_best.pt BOOK.txt
       %(prog)s my-model BOOK.txt --protocol window:100/50
       %(prog)s --pretrained setup.py

Any UTF-8 file can be scored. Symbols that the model does not know are read, counted and not scored.
"""

from pathlib import Path

from rhhn_fairseq.cli.character_models import add_model, check_model, load
from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError

CHUNK, WINDOWS = 100, 32


def main(argv=None) -> None:
    parser = make_parser("score-text", __doc__)
    add_model(parser)
    parser.add_argument("file", type=Path, metavar="FILE", help="the text")
    text = "carry, carry:LANES or window:LENGTH/CONTEXT, as of rhhn eval-lm (default: %(default)s)"
    parser.add_argument("--protocol", default="carry", help=text)
    args = parser.parse_args(argv)
    check_model(args)

    import torch
    from tqdm import tqdm

    from rhhn_fairseq.data.text.words import first_input
    from rhhn_fairseq.tasks.evaluation import Protocol, Tally

    protocol = Protocol.parse(args.protocol)
    content = args.file.read_bytes()
    model, vocabulary = load(args.checkpoint, args.data)
    stream = vocabulary.encode(content if vocabulary.mode == "bytes" else content.decode("utf-8"))
    if not len(stream):
        raise UsageError(f"{args.file}: is empty")
    stream = stream[::-1] if vocabulary.reverse else stream
    cutter = protocol.cut(stream, first_input(vocabulary), CHUNK, WINDOWS, entries=len(vocabulary))
    tally, state = Tally(), None
    for number in tqdm(range(len(cutter)), desc=args.file.name, unit="batch", leave=False, disable=None):
        batch = cutter.batch(number)
        state = state if batch.chunk else None
        with torch.no_grad():
            mask = None if batch.mask is None else torch.from_numpy(batch.mask).T
            y, state = model.eval().stack(model.embed(torch.from_numpy(batch.inputs).T), state, mask)
            scores = model.output(y).float().log_softmax(dim=-1)
        tally.see(0, scores, torch.from_numpy(batch.targets).T, log_probs=True)
        tally.close_batch()
    print(f"{args.file}: {tally.summary(len(stream), vocabulary.unit)}, protocol {protocol.text}")
