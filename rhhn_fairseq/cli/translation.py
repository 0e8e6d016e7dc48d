"""Translates raw text with trained models: sentencepiece encoding, batches, beam search, and decoding.

Works with every checkpoint of fairseq's translation task and of tasks derived from it. The search is the
task's own, so a task with another score uses that here as well.
"""

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from fairseq import utils
from fairseq.dataclass.configs import GenerationConfig

from rhhn_fairseq.compat import ranges
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import one_line
from rhhn_fairseq.inspection.attention import Attention
from rhhn_fairseq.models.loading import TranslationModels

logger = logging.getLogger(__name__)

# No real sentence has more pieces than this, and the search would take minutes.
DEFAULT_SOURCE_PIECES = 1024


@dataclass(frozen=True)
class SearchConfig:
    """Options of the search; ``UsageError`` names an invalid value.

    Attributes:
        beam: hypotheses that are kept at a time.
        nbest: translations returned for each line, at most ``beam``.
        max_len_a, max_len_b: a translation has at most a times the source's pieces plus b pieces.
        lenpen: a hypothesis's log-probability is divided by its length to this power.
        max_tokens: source pieces in a batch, padding included.
        max_source_pieces: longer lines are cut; None for the model's limit, but at most 1024.
    """

    beam: int = 5
    nbest: int = 1
    max_len_a: float = 1.0
    max_len_b: int = 200
    lenpen: float = 1.0
    max_tokens: int = 4000
    max_source_pieces: int | None = None

    def __post_init__(self):
        least = {"beam": 1, "nbest": 1, "max_len_a": 0, "max_len_b": 1, "max_tokens": 1}
        if self.max_source_pieces is not None:
            least["max_source_pieces"] = 1
        for name, smallest in least.items():
            value = getattr(self, name)
            if not smallest <= value < float("inf"):
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} {value} is not possible, the smallest is {smallest}")
        ranges.check({"--lenpen": self.lenpen, "--max-len-a": self.max_len_a})
        if self.nbest > self.beam:
            raise UsageError(f"--nbest {self.nbest} is more than --beam {self.beam} hypotheses")

    def for_fairseq(self) -> GenerationConfig:
        """Returns fairseq's configuration of the same search."""
        names = ("beam", "nbest", "max_len_a", "max_len_b", "lenpen")
        return GenerationConfig(**{name: getattr(self, name) for name in names})


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
        self.models, self.task, self.pieces = loaded.models, loaded.task, loaded.pieces
        self.config, self.device = config, torch.device(device)
        self.cut = 0
        self.max_pieces = max_source_pieces(self.models, self.task, config)
        generation = config.for_fairseq()
        for model in self.models:
            model.to(self.device)
            model.prepare_for_inference_(argparse.Namespace(generation=generation))
        self.generator = self.task.build_generator(self.models, generation)

    def translate(
        self,
        lines: Sequence[str],
        first_line: int = 1,
        on_batch: Callable[[int], object] | None = None,
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
        lengths = [len(source) for source in sources]
        dataset = self.task.build_dataset_for_inference(sources, lengths)
        dataset.left_pad_source = self.task.cfg.left_pad_source
        for batch in batches(lengths, self.config.max_tokens):
            sample = dataset.collater([dataset[index] for index in batch])
            if self.device.type == "cuda":
                sample = utils.move_to_cuda(sample, self.device)
            hypotheses_of_batch = self.task.inference_step(self.generator, self.models, sample)
            for index, hypotheses in zip(sample["id"].tolist(), hypotheses_of_batch, strict=True):
                best = hypotheses[: self.config.nbest]
                results[places[index]] = [self._translation(hypothesis) for hypothesis in best]
            if on_batch is not None:
                on_batch(len(batch))
        return results

    def attend(self, line: str) -> tuple[Translation, Attention]:
        """Translates one line; returns its best translation and the attention of all models together.

        Raises:
            UsageError: there is nothing to translate, or the model has no attention.
        """
        pieces = self.pieces.encode(line, out_type=str)
        if not pieces or line.isspace():
            raise UsageError(f"the text {line!r} has nothing to translate")
        source = self._source(pieces, 1)
        dataset = self.task.build_dataset_for_inference([source], [len(source)])
        dataset.left_pad_source = self.task.cfg.left_pad_source
        sample = dataset.collater([dataset[0]])
        if self.device.type == "cuda":
            sample = utils.move_to_cuda(sample, self.device)
        for model in self.models:
            # fairseq's own decoders return no attention unless asked to.
            if hasattr(model.decoder, "need_attn"):
                model.decoder.need_attn = True
        best = self.task.inference_step(self.generator, self.models, sample)[0][0]
        weights = best["attention"]
        if weights is None or not weights.numel():
            raise UsageError("the model has no attention")
        target = tuple(self.task.target_dictionary[entry] for entry in best["tokens"].tolist())
        names = tuple(self.task.source_dictionary[entry] for entry in source.tolist())
        seen = Attention(names, target, weights.double().cpu().numpy()[:, : len(target)])
        return self._translation(best), seen

    def _source(self, pieces: list[str], line: int) -> torch.Tensor:
        """Returns the dictionary entries [S] of pieces, with the end of the sentence."""
        if len(pieces) > self.max_pieces:
            self.cut += 1
            if self.cut == 1:
                logger.warning(
                    "line %d has %d pieces and is cut to the first %d (see --max-source-pieces)",
                    line,
                    len(pieces),
                    self.max_pieces,
                )
            pieces = pieces[: self.max_pieces]
        dictionary = self.task.source_dictionary
        indices = map(dictionary.index, pieces)
        # Sentencepiece keeps text that it cannot encode as it is, and that may equal a special symbol.
        entries = [entry if entry >= dictionary.nspecial else dictionary.unk() for entry in indices]
        return torch.tensor([*entries, dictionary.eos()])

    def _translation(self, hypothesis: dict) -> Translation:
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
    if config.max_source_pieces is None:
        return min(possible, task.max_positions()[0] - 1, DEFAULT_SOURCE_PIECES)
    if config.max_source_pieces > possible:
        raise UsageError(
            f"--max-source-pieces {config.max_source_pieces} is more than the model takes, {possible}"
        )
    return config.max_source_pieces
