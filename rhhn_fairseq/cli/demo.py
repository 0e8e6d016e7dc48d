"""Serves a page that shows text and handwriting as a model generates them, and the change of its weights.

Usage: %(prog)s
       %(prog)s --checkpoint checkpoints/ptb/checkpoint_best.pt --port 8080

The page shows the packaged models of text, of handwriting and of Kanji, which are drawn without a text.
--checkpoint replaces the one of the same kind, and may be repeated. Only this machine can reach the page.
Ctrl-C ends it.
"""

import socket

from rhhn_fairseq.cli import character_models, write
from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError

HOST = "127.0.0.1"


def main(argv=None) -> None:
    parser = make_parser("demo", __doc__)
    add = parser.add_argument
    add("--checkpoint", action="append", default=[], help="checkpoint, or directory of `rhhn convert`")
    add("--data", help="data directory of the language model (default: that of its training)")
    add("--port", type=int, default=8000, help="port of the page; 0: any free one (default: %(default)s)")
    args = parser.parse_args(argv)

    from rhhn_fairseq.demo.server import make_app, make_server

    with bind(args.port) as listener:
        server = make_server(make_app(load_models(args.checkpoint, args.data)))
        print(f"http://{HOST}:{listener.getsockname()[1]}  (Ctrl-C ends it)", flush=True)
        server.run(sockets=[listener])


def bind(port: int) -> socket.socket:
    """Returns a socket that listens on this machine only. Raises OSError for a taken port."""
    return socket.create_server((HOST, port))


def load_models(checkpoints: list[str], data: str | None):
    """Loads the models of these checkpoints, and the packaged model of each kind that has none.

    Raises:
        UsageError: a checkpoint cannot be read, two are of one kind, or one reads from right to left.
    """
    from rhhn_fairseq.demo.streams import Models
    from rhhn_fairseq.saving import packaged

    paths: dict[str, str] = {}
    for path in checkpoints:
        kind = kind_of(path)
        if kind in paths:
            raise UsageError(f"--checkpoint {path}: is of a model of {kind}, as {paths[kind]} is")
        paths[kind] = path
    if data is not None and "characters" not in paths:
        raise UsageError("--data goes with a --checkpoint of a language model")
    characters, vocabulary = character_models.load(paths.get("characters"), data)
    if vocabulary.reverse:
        raise UsageError(
            f"--checkpoint {paths['characters']}: reads texts from right to left, and the page shows a text "
            "as it comes; `rhhn sample` draws from this model"
        )
    strokes = (write.load(paths.get(kind, packaged(kind)))[0] for kind in ("handwriting", "kanji"))
    return Models(characters, vocabulary, *strokes)


def kind_of(path: str) -> str:
    """Returns which packaged model a checkpoint replaces; "kanji" are drawn without a text."""
    import rhhn_fairseq.plugin  # noqa: F401  (what a checkpoint may hold)
    from rhhn_fairseq.models.loading import load_weights

    weights = load_weights(path)
    if "statistics" not in weights:
        return "characters"
    return "handwriting" if any("window" in name for name in weights) else "kanji"
