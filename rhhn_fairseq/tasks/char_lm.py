"""Task ``char_lm``: language modelling on one long text, with the state carried along it.

The symbols are characters or bytes, or the words of a directory that fairseq-preprocess made.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import List

import numpy as np
import torch
from fairseq.data import Dictionary, FairseqDataset
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.compat.recipes import typed_config
from rhhn_fairseq.data.text.stream import open_stream
from rhhn_fairseq.data.text.vocabulary import MODES, UNK, CharVocabulary, escape
from rhhn_fairseq.data.text.words import WordVocabulary, first_input, load_vocabulary, prompt_indices
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.tasks.carry import Carry, gather_states, pass_seed
from rhhn_fairseq.tasks.dynamic_evaluation import DynamicEvaluation
from rhhn_fairseq.tasks.dynamics import DynamicsTaskConfig, LogsDynamics
from rhhn_fairseq.tasks.evaluation import MOST_LOGITS, Protocol, ScoredBatches
from rhhn_fairseq.tasks.lanes import PAD, Batch, Lanes, RandomWindows
from rhhn_fairseq.tasks.own_batches import BatchDataset, CutsOwnBatches, OrderedBatchIterator, frequency_of

logger = logging.getLogger(__name__)

EVALUATION_WINDOWS = 64
_DIRECTIONS = {False: "from left to right", True: "from right to left"}
DYNAMIC_LANES = 100


@dataclass
class CharLMTaskConfig(DynamicsTaskConfig):
    data: str = option(MISSING, help="directory that `rhhn prepare` made, or fairseq-preprocess of words")
    tokens_per_sample: int = option(
        100, help="number of symbols per lane or training window in a batch", low=1
    )
    batching: str = option(
        "lanes",
        help="training text: 'lanes' reads --batch-size contiguous lanes with carried state, 'windows' draws "
        "windows at random and reads each from the zero state",
        choices=("lanes", "windows"),
    )
    reverse: bool = option(False, help="read texts from right to left, in training and afterwards")
    protocol: str = option(
        "carry", help="protocol of fairseq-eval-lm: carry, carry:LANES or window:LENGTH/CONTEXT"
    )
    valid_protocol: str = option("carry:32", help="protocol of validation during training, see --protocol")
    dynamic_eval: bool = option(
        False, help="fairseq-eval-lm: train on each chunk after it was scored; needs --protocol carry"
    )
    dynamic_eval_lr: float = option(
        5e-5, help="--dynamic-eval: rate of a step, over the gradient's root mean square", low=0
    )
    dynamic_eval_decay: float = option(
        2e-3, help="--dynamic-eval: rate of decay towards the checkpoint's weights", low=0, below=1
    )
    dynamic_eval_batches: int = option(
        200, help="--dynamic-eval: training batches from which the root mean square is measured", low=1
    )
    seed: int = II("common.seed")
    train_subset: str = II("dataset.train_subset")
    update_freq: List[int] = II("optimization.update_freq")

    def check(self):
        super().check()
        Protocol.parse(self.protocol)
        Protocol.parse(self.valid_protocol, "--valid-protocol")
        if self.dynamic_eval and self.protocol != "carry":
            raise UsageError(
                f"--dynamic-eval reads the text once, in order: choose --protocol carry, not {self.protocol}"
            )
        for name in ("dynamic_eval_lr", "dynamic_eval_decay", "dynamic_eval_batches"):
            if not self.dynamic_eval and getattr(self, name) != self.__dataclass_fields__[name].default:
                raise UsageError(f"--{name.replace('_', '-')} goes with --dynamic-eval")


@register_task("char_lm", dataclass=CharLMTaskConfig)
class CharLMTask(CutsOwnBatches, LogsDynamics, FairseqTask):
    """Character language modelling.

    Training in ``lanes`` carries the state across chunks, batches, workers and checkpoints: there is one
    ``Carry`` for each group of lanes that this worker trains, one for validation, and
    ``fairseq-eval-lm`` has its own.
    """

    def __init__(
        self, cfg: CharLMTaskConfig, vocabulary: CharVocabulary | WordVocabulary, dictionary: Dictionary
    ):
        super().__init__(cfg)
        self.vocabulary, self.dictionary = vocabulary, dictionary
        self.first_input = first_input(vocabulary)
        self.layout: dict | None = None
        self.carries: list[Carry] = []
        self.valid_carry = Carry()
        self._saved_states: list[list[torch.Tensor]] | None = None
        # The corpora of loaded checkpoints, where the checkpoints name them.
        self.trained_on: list[str] = []
        self.models: list[torch.nn.Module] = []

    @classmethod
    def setup_task(cls, cfg, **kwargs):
        cfg = typed_config(cfg, cls)
        cfg.check()
        vocabulary = load_vocabulary(cfg.data)
        vocabulary.reverse = cfg.reverse
        dictionary = Dictionary.load(str(Path(cfg.data) / "dict.txt"))
        corpus = vocabulary.corpus or f"a text of {len(vocabulary.model_indices())} symbols"
        logger.info("%s: %s%s", cfg.data, corpus, _direction(cfg.reverse))
        return cls(cfg, vocabulary, dictionary)

    @classmethod
    def of_checkpoint(cls, state: dict) -> "CharLMTask | None":
        """Returns the task of a checkpoint that holds its characters; its data need not be there.

        None for other checkpoints: models of words, other tasks, and those older than the entry ``mode``.
        """
        stored = state.get("task_state") or {}
        if stored.get("mode") not in MODES:
            return None
        cfg = typed_config(state["cfg"].task, cls)
        codes = state["model"]["symbol_codes"].tolist()
        vocabulary = CharVocabulary.from_codes(codes, stored["mode"], stored.get("corpus"), cfg.reverse)
        dictionary = Dictionary()
        for symbol in vocabulary.symbols:
            dictionary.add_symbol(escape(symbol))
        return cls(cfg, vocabulary, dictionary)

    @property
    def source_dictionary(self):
        return self.dictionary

    @property
    def target_dictionary(self):
        return self.dictionary

    def build_model(self, cfg, from_checkpoint=False):
        """Builds a model and keeps it in ``models``, because dynamic evaluation trains it."""
        model = super().build_model(cfg, from_checkpoint)
        self.models.append(model)
        return model

    def load_dataset(self, split, combine=False, **kwargs):
        """Opens a split; its text is read from disk as it is needed."""
        self.datasets[split] = StreamDataset(self.open_split(split), split)

    def open_split(self, split: str) -> np.ndarray:
        """Returns the dictionary indices [N] of a split, in the order in which the model reads them.

        Raises:
            UsageError: the data has no such split, or it is damaged.
        """
        stream = open_stream(Path(self.cfg.data) / split, len(self.dictionary))
        return stream[::-1] if self.cfg.reverse else stream

    @property
    def row_steps(self) -> int:
        """The number of symbols in a row of a training batch."""
        return self.cfg.tokens_per_sample

    def cut_batches(self, dataset, B, workers, rank, training):
        """See ``CutsOwnBatches``."""
        if training:
            cutter = self._cut_training(dataset, B, workers, rank)
            return BatchDataset(cutter, text_sample), isinstance(cutter, RandomWindows)
        protocol = Protocol.parse(self.cfg.valid_protocol)
        logger.info("%s split of %s, protocol %s", dataset.split, self._corpus_name(), protocol.text)
        T = self.cfg.tokens_per_sample
        cutter = protocol.cut(dataset.stream, self.first_input, T, B, workers, len(self.dictionary))
        return BatchDataset(cutter, text_sample), False

    def _cut_training(self, dataset, B, workers, rank):
        T, N = self.cfg.tokens_per_sample, len(dataset.stream)
        groups = workers * frequency_of(self.cfg.update_freq, "the text is cut into lanes once")
        where = f"the {dataset.split} split of {self.cfg.data}"
        if N < B * groups * T:
            raise UsageError(
                f"{where} has {N:,} symbols, fewer than one update of {B * groups} lanes or windows of {T} "
                f"({B * groups * T:,}); lower --batch-size, --update-freq or --tokens-per-sample"
            )
        if self.cfg.batching == "windows":
            return RandomWindows(dataset.stream, self.first_input, T, B, groups, self.cfg.seed)
        lanes = Lanes(dataset.stream, self.first_input, B * groups, groups, T)
        layout = {"lanes": B * groups, "groups": groups, "tokens_per_sample": T, "symbols": N}
        if layout != self.layout:
            self.layout, self.chunks = layout, lanes.chunks
            self.carries = [Carry() for _ in range(groups // workers)]
        self.workers, self.rank = workers, rank
        return lanes

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        torch.manual_seed(pass_seed(self.cfg.seed, update_num, sample["group"]))
        if self.cfg.batching == "lanes":
            carry = Carry()
            # A pass whose gradient is discarded must not advance the text.
            if not ignore_grad:
                carry = self.carries[sample["group"] // self.workers].open(sample["chunk"])
            sample = _with_carry(sample, carry)
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def valid_step(self, sample, model, criterion):
        if sample:
            # Workers without a batch of their own get an empty one.
            sample = _with_carry(sample, self.valid_carry.open(sample["chunk"]))
        return super().valid_step(sample, model, criterion)

    def eval_lm_dataloader(self, dataset, batch_size=None, num_shards=1, num_workers=0, **unused):
        """Returns the batches for fairseq-eval-lm; the summary is logged when they are exhausted.

        Raises:
            UsageError: there are several shards; or with ``--dynamic-eval`` several models, or one that is
                not in float32.
        """
        if num_shards > 1:
            raise UsageError(f"--num-shards {num_shards}: a text is evaluated by one process")
        protocol = Protocol.parse(self.cfg.protocol)
        cutter = protocol.cut(
            dataset.stream,
            self.first_input,
            self.cfg.tokens_per_sample,
            batch_size or EVALUATION_WINDOWS,
            entries=len(self.dictionary),
        )
        batches = OrderedBatchIterator(BatchDataset(cutter, text_sample), num_workers=num_workers)
        title = (
            f"{self._corpus_name()}, {dataset.split}{_direction(self.cfg.reverse)}, protocol {protocol.text}"
        )
        others = [corpus for corpus in self.trained_on if corpus != self.vocabulary.corpus]
        if others:
            title += f", trained on {' and '.join(others)}"
        learner = None
        if self.cfg.dynamic_eval:
            lr, decay = self.cfg.dynamic_eval_lr, self.cfg.dynamic_eval_decay
            learner = self._dynamic_evaluation(lr, decay)
            title += f", dynamic evaluation (lr {lr:g}, decay {decay:g})"
        return ScoredBatches(
            batches.next_epoch_itr(), len(dataset.stream), title, self.vocabulary.unit, learner
        )

    def _dynamic_evaluation(self, lr: float, decay: float) -> DynamicEvaluation:
        if len(self.models) != 1:
            raise UsageError(f"--dynamic-eval trains one model, --path names {len(self.models)}")
        split = self.cfg.train_subset
        self.load_dataset(split)
        stream, T = self.dataset(split).stream, self.cfg.tokens_per_sample
        lanes = max(1, min(DYNAMIC_LANES, len(stream), MOST_LOGITS // (T * len(self.dictionary))))
        training = Lanes(stream, self.first_input, lanes, 1, T)
        batches = min(self.cfg.dynamic_eval_batches, len(training))
        samples = (text_sample(training.batch(i)) for i in range(batches))
        return DynamicEvaluation(self.models[0], lr, decay, samples)

    def _corpus_name(self) -> str:
        return self.vocabulary.corpus or str(self.cfg.data)

    def encode_prompt(self, text: str) -> list[int]:
        """See ``prompt_indices``."""
        return prompt_indices(self.vocabulary, text)

    def state_dict(self):
        """Returns what a checkpoint keeps: reading direction, kind of symbols, and the corpus if named."""
        corpus = {} if self.vocabulary.corpus is None else {"corpus": self.vocabulary.corpus}
        return {"reverse": self.cfg.reverse, "mode": self.vocabulary.mode} | corpus

    def load_state_dict(self, state_dict):
        """Records a loaded checkpoint's corpus.

        Raises:
            UsageError: the checkpoint reads in the other direction.
        """
        self.check_direction(state_dict)
        corpus = state_dict.get("corpus")
        if corpus is not None and corpus not in self.trained_on:
            self.trained_on.append(corpus)

    def check_direction(self, state: dict) -> None:
        """Raises UsageError if a checkpoint with this state of the task reads in the other direction."""
        # Checkpoints that do not say are older than the option.
        reverse = state.get("reverse", False)
        if reverse != self.cfg.reverse:
            raise UsageError(
                f"the checkpoint reads texts {_DIRECTIONS[reverse]}: "
                + ("give --reverse" if reverse else "leave --reverse out")
            )

    def gather_checkpoint_state(self) -> None:
        """Collects the lanes of all workers; every worker must call it before a checkpoint is saved."""
        self._saved_states = None
        # After the last chunk, the next epoch begins from zeros with any layout.
        if self.carries and 0 <= self.carries[0].chunk < self.chunks - 1:
            self._saved_states = gather_states(self.carries, self.workers)

    def get_checkpoint_dict(self):
        state = {"reverse": self.cfg.reverse, "batching": self.cfg.batching}
        if self._saved_states is not None:
            state |= {"layout": self.layout, "chunk": self.carries[0].chunk, "states": self._saved_states}
        return {type(self).__name__: state}

    def set_checkpoint_dict(self, state):
        """Resumes the lanes of a checkpoint that was saved in mid-epoch.

        Raises:
            UsageError: the checkpoint reads in the other direction, or its lanes differ from this run's, so
                that its states belong to other text.
        """
        self.check_direction(state)
        # Checkpoints that do not say are older than this entry.
        batching = state.get("batching", self.cfg.batching)
        if batching != self.cfg.batching:
            raise UsageError(
                f"the checkpoint was trained with --batching {batching}, this run has {self.cfg.batching}: "
                "give the same, or --reset-dataloader to begin again at epoch 1"
            )
        if "states" not in state:
            return
        layout = self.layout or {}
        different = [key for key in layout if state["layout"][key] != layout[key]]
        if different:
            was = ", ".join(f"{key} {state['layout'][key]}" for key in different)
            now = ", ".join(f"{key} {layout[key]}" for key in different)
            raise UsageError(
                f"the checkpoint was saved in mid-epoch with {was}, this run has {now}: its states belong to "
                "other places of the text; resume with the same --batch-size, --tokens-per-sample and "
                "workers x --update-freq, or give --reset-dataloader to begin again at epoch 1"
            )
        mine = state["states"][self.rank :: self.workers]
        self.carries = [Carry(state["chunk"], tuple(after)) for after in mine]


def _direction(reverse: bool) -> str:
    """Returns the words for the direction in a title; none for left to right."""
    return f", read {_DIRECTIONS[True]}" if reverse else ""


def _with_carry(sample, carry):
    return sample | {"net_input": sample["net_input"] | {"carry": carry}}


class StreamDataset(FairseqDataset):
    """One split as a stream of dictionary indices [N]; what ``task.dataset(split)`` returns."""

    def __init__(self, stream: np.ndarray, split: str):
        self.stream, self.split = stream, split

    def __len__(self):
        return len(self.stream)

    def __getitem__(self, index):
        return int(self.stream[index])


def text_sample(batch: Batch) -> dict:
    """Returns a batch as fairseq's sample; ``ntokens`` counts the targets that are scored."""
    scored = (batch.targets != PAD) & (batch.targets != UNK)
    mask = None if batch.mask is None else torch.from_numpy(batch.mask)
    return {
        "id": torch.arange(len(batch.inputs)),
        "nsentences": len(batch.inputs),
        "ntokens": int(scored.sum()),
        "net_input": {"src_tokens": torch.from_numpy(batch.inputs), "mask": mask},
        "target": torch.from_numpy(batch.targets),
        # Where fairseq's scorer begins: it strips padding from the end by itself.
        "start_indices": (batch.targets == PAD).argmin(axis=1).tolist(),
        "chunk": batch.chunk,
        "group": batch.group,
    }
