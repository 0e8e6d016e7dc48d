"""Translates raw text line by line: the output has as many lines as the input, in the same order.

Usage: %(prog)s --checkpoint checkpoints/lstm_gnmt_small/checkpoint_best.pt < text.en

Standard input is read in parts of --buffer-size lines, each of which is translated and written before the
next is read, so the text may be of any length. Where lines arrive slowly, a part is what has arrived.
Empty lines stay empty.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rhhn_fairseq.cli.parsers import add_fields, make_parser, read_fields
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.options import option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from rhhn_fairseq.inspection.attention import Attention
    from rhhn_fairseq.models.loading import TranslationModels

logger = logging.getLogger(__name__)

# The most lines read before any is written; enough for batches of sentences of one length.
BUFFER_SIZE = 1024

# No real sentence has more pieces than this, and the search would take minutes.
DEFAULT_SOURCE_PIECES = 1024

# These end lines for some readers of JSON lines, although not by its definition.
LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


def main(argv=None) -> None:
    args = parse_arguments(argv)
    names = ("length_penalty", "coverage_penalty", "beam_size_threshold", "source_lang", "target_lang")
    task_options = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.buffer_size is not None and args.buffer_size < 1:
        raise UsageError(f"--buffer-size {args.buffer_size} is too small, the smallest is 1")
    if args.nbest > 1 and not args.json:
        raise UsageError(f"--nbest {args.nbest} needs --json: plain text has one translation a line")

    import torch
    from fairseq.utils import split_paths

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.files import check_output, replace_file
    from rhhn_fairseq.models.loading import load_translation_models

    config = read_fields(SearchConfig, args)
    checkpoints = [path for given in args.checkpoint for path in split_paths(given)]
    check_output("--output", args.output, (args.input, *checkpoints))
    if args.input is None and sys.stdin is None:
        raise UsageError("standard input is closed; name the text with --input")
    given = open(args.input, "rb") if args.input else nullcontext(sys.stdin.buffer)  # noqa: SIM115 - closed
    output = nullcontext(sys.stdout.buffer) if args.output is None else replace_file(args.output)
    with given as source, output as file:
        loaded = load_translation_models(checkpoints, args.data, args.sentencepiece_model, task_options)
        on_gpu = torch.cuda.is_available() and not args.cpu
        translator = Translator(loaded, config, "cuda" if on_gpu else "cpu")
        translate(translator, source, file, args)
    if translator.cut > 1:
        logger.warning("%d lines were cut", translator.cut)


def parse_arguments(argv):
    parser = make_parser("translate", __doc__)
    add = parser.add_argument
    text = "trained model; give it several times, or a.pt:b.pt, for an ensemble"
    add("--checkpoint", action="append", required=True, metavar="FILE", help=text)
    add_data(parser)
    add("--source-lang", metavar="LANG", help="source language (default: from the checkpoint or the data)")
    add("--target-lang", metavar="LANG", help="target language (default: from the checkpoint or the data)")
    add("--input", metavar="FILE", help="text to translate (default: standard input)")
    add("--output", metavar="FILE", help="file, written when all is translated (default: standard output)")
    add("--json", action="store_true", help="write JSON lines with scores, not text")
    text = "how to treat input that is not UTF-8"
    add("--errors", choices=("strict", "replace"), default="strict", help=text)
    add_fields(parser, SearchConfig())
    add("--length-penalty", metavar="NAME:ALPHA", help="fairseq, none or gnmt:ALPHA, as in gnmt_translation")
    text = "weight of the coverage penalty, as in gnmt_translation"
    add("--coverage-penalty", type=float, metavar="BETA", help=text)
    add("--beam-size-threshold", type=float, metavar="T", help="pruning of the beam, as in gnmt_translation")
    text = f"lines to read before writing (default: at most {BUFFER_SIZE}; 1 at a terminal)"
    add("--buffer-size", type=int, metavar="N", help=text)
    add("--cpu", action="store_true", help="run on the CPU even if there is a GPU")
    return parser.parse_args(argv)


def add_data(parser) -> None:
    """Adds the options that name a model's dictionaries and pieces."""
    text = "directory of the dictionaries (default: that of the training)"
    parser.add_argument("--data", metavar="DIR", help=text)
    text = "sentencepiece model (default: pieces.model in the data directory)"
    parser.add_argument("--sentencepiece-model", metavar="FILE", help=text)


def translate(translator: Translator, source, output, args) -> None:
    """Reads, translates and writes in batches; shows progress on standard error if the input is a file."""
    from tqdm import tqdm

    from rhhn_fairseq.files import count_lines, decode_batches

    size = args.buffer_size or (1 if source.isatty() else BUFFER_SIZE)
    # A pipe can be read only once.
    total = count_lines(args.input) if args.input and os.path.isfile(args.input) else None
    done = 0
    with tqdm(total=total, unit=" lines", disable=None if args.input else True) as progress:
        for batch in decode_batches(source, args.input or "standard input", size, args.errors):
            translations = translator.translate(batch, first_line=done + 1, on_batch=progress.update)
            rows = [best[0].text for best in translations]
            if args.json:
                rows = [
                    {"source": line, "translations": [dataclasses.asdict(each) for each in best]}
                    for line, best in zip(batch, translations, strict=True)
                ]
                rows = [json.dumps(row, ensure_ascii=False).translate(LINE_ENDS) for row in rows]
            output.write("".join(f"{row}\n" for row in rows).encode("utf-8"))
            output.flush()
            done += len(batch)


@dataclass(frozen=True)
class SearchConfig:
    """Options of the search; ``UsageError`` names an invalid value."""

    beam: int = option(5, help="width of the beam")
    nbest: int = option(1, help="translations per line, needs --json")
    max_len_a: float = option(1.0, help="at most A n + B pieces, n those of the source with its end: A")
    max_len_b: int = option(200, help="the B of --max-len-a")
    lenpen: float = option(1.0, help="a log-probability is divided by the length to this power")
    max_tokens: int = option(4000, help="source pieces in a batch, padding included")
    max_source_pieces: int = option(0, help="cut longer lines; 0: at the model's limit, at most 1024")

    def __post_init__(self):
        from rhhn_fairseq.compat import ranges

        ranges.check({f"--{name.replace('_', '-')}": value for name, value in vars(self).items()})


@dataclass(frozen=True)
class Translation:
    """One translation of a line.

    Attributes:
        text: without line breaks of any kind. score: what the search ranks by; for fairseq's own search the
        natural log-probability divided by length to the power ``lenpen``. pieces: its length without the end
        of the sentence.
    """

    text: str
    score: float
    pieces: int


# The translation of a line without content.
EMPTY = Translation("", 0.0, 0)


class Translator:
    """Trained models and a search.

    Args:
        loaded: the models; see ``load_translation_models``. They are moved to ``device``, and can no
            longer be trained.
        config: options of the search. device: where to compute.

    Attributes:
        cut: number of lines so far that were longer than ``max_source_pieces``.
    """

    def __init__(self, loaded: TranslationModels, config: SearchConfig, device: torch.device | str = "cpu"):
        import torch
        from fairseq.dataclass.configs import GenerationConfig

        self.models, self.task, self.pieces = loaded.models, loaded.task, loaded.pieces
        self.config, self.device = config, torch.device(device)
        self.cut = 0
        self.max_pieces = max_source_pieces(self.models, self.task, config)
        names = ("beam", "nbest", "max_len_a", "max_len_b", "lenpen")
        generation = GenerationConfig(**{name: getattr(config, name) for name in names})
        for model in self.models:
            model.to(self.device)
            model.prepare_for_inference_(argparse.Namespace(generation=generation))
        self.generator = self.task.build_generator(self.models, generation)

    def translate(
        self, lines: Sequence[str], first_line: int = 1, on_batch: Callable[[int], object] | None = None
    ) -> list[list[Translation]]:
        """Translates each line separately; returns for each line its translations, the best first.

        A line of white space, or of characters that sentencepiece drops, is translated as the empty text.
        A line of too many pieces is cut, and a warning names the first such line.

        Args:
            lines: any text. first_line: the number of the first line, for that warning.
            on_batch: called with the number of lines of each finished batch.
        """
        results = [[EMPTY] for _ in lines]
        sources, places = [], []
        for place, (line, pieces) in enumerate(
            zip(lines, self.pieces.encode(list(lines), out_type=str), strict=True)
        ):
            if pieces and not line.isspace():
                places.append(place)
                sources.append(self._source(pieces, first_line + place))
        if on_batch is not None:
            on_batch(len(lines) - len(sources))
        for batch in batches([len(source) for source in sources], self.config.max_tokens):
            for index, hypotheses in self._search(sources, batch):
                best = hypotheses[: self.config.nbest]
                results[places[index]] = [self._translation(hypothesis) for hypothesis in best]
            if on_batch is not None:
                on_batch(len(batch))
        return results

    def _search(self, sources: list[torch.Tensor], batch: list[int]):
        """Yields the index and the hypotheses of each sentence of a batch."""
        from fairseq import utils

        dataset = self.task.build_dataset_for_inference(sources, [len(source) for source in sources])
        dataset.left_pad_source = self.task.cfg.left_pad_source
        sample = dataset.collater([dataset[index] for index in batch])
        if self.device.type == "cuda":
            sample = utils.move_to_cuda(sample, self.device)
        found = self.task.inference_step(self.generator, self.models, sample)
        yield from zip(sample["id"].tolist(), found, strict=True)

    def attend(self, line: str) -> tuple[Translation, Attention]:
        """Translates one line; returns its best translation and the attention of all models together.

        Raises:
            UsageError: there is nothing to translate, or the model has no attention.
        """
        from rhhn_fairseq.inspection.attention import Attention

        pieces = self.pieces.encode(line, out_type=str)
        if not pieces or line.isspace():
            raise UsageError(f"the text {line!r} has nothing to translate")
        source = self._source(pieces, 1)
        for model in self.models:
            # fairseq's own decoders return no attention unless asked to.
            if hasattr(model.decoder, "need_attn"):
                model.decoder.need_attn = True
        ((_, (best, *_)),) = self._search([source], [0])
        weights = best["attention"]
        if weights is None or not weights.numel():
            raise UsageError("the model has no attention")
        target = tuple(self.task.target_dictionary[entry] for entry in best["tokens"].tolist())
        names = tuple(self.task.source_dictionary[entry] for entry in source.tolist())
        seen = Attention(names, target, weights.double().cpu().numpy()[:, : len(target)])
        return self._translation(best), seen

    def _source(self, pieces: list[str], line: int) -> torch.Tensor:
        """Returns the dictionary entries [S] of pieces, with the end of the sentence."""
        import torch

        if len(pieces) > self.max_pieces:
            self.cut += 1
            if self.cut == 1:
                text = "line %d has %d pieces and is cut to the first %d (see --max-source-pieces)"
                logger.warning(text, line, len(pieces), self.max_pieces)
            pieces = pieces[: self.max_pieces]
        dictionary = self.task.source_dictionary
        indices = map(dictionary.index, pieces)
        # Sentencepiece keeps text that it cannot encode as it is, and that may equal a special symbol.
        entries = [entry if entry >= dictionary.nspecial else dictionary.unk() for entry in indices]
        return torch.tensor([*entries, dictionary.eos()])

    def _translation(self, hypothesis: dict) -> Translation:
        from rhhn_fairseq.files import one_line

        dictionary = self.task.target_dictionary
        silent = (dictionary.bos(), dictionary.eos(), dictionary.pad())
        entries = [entry for entry in hypothesis["tokens"].tolist() if entry not in silent]
        # Sentencepiece writes its own sign for an unknown symbol and joins bytes into characters.
        text = self.pieces.decode([dictionary[entry] for entry in entries])
        return Translation(one_line(text).strip(), float(hypothesis["score"]), len(entries))


def batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Groups the indices of sentences, the longest first, into batches of ``max_tokens`` with padding.

    A sentence that alone exceeds the limit forms its own batch.
    """
    grouped: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if grouped and (len(grouped[-1]) + 1) * lengths[grouped[-1][0]] <= max_tokens:
            grouped[-1].append(index)
        else:
            grouped.append([index])
    return grouped


def max_source_pieces(models, task, config: SearchConfig) -> int:
    """Returns how many pieces of a line are read, without the end of the sentence.

    Raises:
        UsageError: more are requested than the models accept.
    """
    possible = int(min(model.max_positions()[0] for model in models)) - 1
    if not config.max_source_pieces:
        return min(possible, task.max_positions()[0] - 1, DEFAULT_SOURCE_PIECES)
    if not 0 <= config.max_source_pieces <= possible:
        raise UsageError(
            f"--max-source-pieces {config.max_source_pieces} is not possible: the model takes {possible}"
        )
    return config.max_source_pieces
