"""Options shared by commands that analyse a character language model: the model and the text it reads."""

import os

from rhhn_fairseq.errors import UsageError


def add_model(parser) -> None:
    """Adds the options that name a model."""
    parser.add_argument(
        "checkpoint", nargs="?", help="checkpoint of a language model, or a directory of `rhhn convert`"
    )
    parser.add_argument(
        "--pretrained", action="store_true", help="use the packaged model of Python source code"
    )
    parser.add_argument("--data", help="data directory of a checkpoint that does not hold its symbols")


def check_model(args) -> None:
    """Raises UsageError unless the arguments name one model."""
    if args.pretrained == (args.checkpoint is not None):
        raise UsageError("give either a checkpoint or --pretrained")
    if args.data is not None and (args.pretrained or os.path.isdir(args.checkpoint)):
        raise UsageError("--data goes with a checkpoint, other models hold their symbols")


def load(checkpoint: str | None, data: str | None = None):
    """Loads a network and its vocabulary; None is the packaged model. Only checkpoints import fairseq."""
    if checkpoint is None or os.path.isdir(checkpoint):
        from rhhn_fairseq.nn import CharacterNetwork, packaged

        network = CharacterNetwork.from_pretrained(
            packaged("characters") if checkpoint is None else checkpoint
        )
        return network, network.vocabulary

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.models.loading import load_char_lm

    model, task = load_char_lm(checkpoint, data)
    return model, task.vocabulary


def add_text(parser, required: bool = True) -> None:
    """Adds the options that give a text."""
    text = parser.add_mutually_exclusive_group(required=required)
    text.add_argument("--text", help="the text to read")
    text.add_argument("--file", metavar="FILE", help="file of the text to read, UTF-8")


def given_text(args) -> str:
    """Returns the text that the arguments give, of a length that can be traced symbol by symbol.

    Raises:
        UsageError: it is empty or too long, or its file cannot be read.
    """
    from rhhn_fairseq.files import read_regular
    from rhhn_fairseq.inspection.tracing import MOST_SYMBOLS, check_length

    # A character has at most four bytes in UTF-8.
    most = 4 * MOST_SYMBOLS
    text = args.text if args.file is None else read_regular(args.file, most).decode("utf-8")
    check_length(len(text))
    return text
