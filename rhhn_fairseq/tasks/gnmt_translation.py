"""Task ``gnmt_translation``: fairseq's translation with GNMT's beam scores and the pieces' fingerprint."""

import logging
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from fairseq import utils
from fairseq.data import BaseWrapperDataset, LanguagePairDataset
from fairseq.logging import metrics
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import II
from sacrebleu.metrics import BLEU

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.compat.recipes import typed_config
from rhhn_fairseq.data.parallel.corpora import pieces_sha256
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.generate.gnmt_score import LENGTH_PENALTIES, GNMTScore, Pruning
from rhhn_fairseq.tasks.carry import pass_seed
from rhhn_fairseq.tasks.detaching import DetachingTask, DetachTaskConfig
from rhhn_fairseq.tasks.dynamics import DynamicsTaskConfig, LogsDynamics
from rhhn_fairseq.tasks.gnmt_search import GNMTGenerator
from rhhn_fairseq.tasks.segmentation import MOST_SEGMENTATIONS, SegmentationSampler

logger = logging.getLogger(__name__)

# Searches other than the plain beam, to which pruning does not apply.
OTHER_SEARCHES = ("sampling", "match_source_len", "constraints", "prefix_allowed_tokens_fn")
DIVERSE_SEARCHES = ("diverse_beam_groups", "diversity_rate")


@dataclass
class GNMTTranslationConfig(TranslationConfig, DetachTaskConfig, DynamicsTaskConfig):
    length_penalty: str = option(
        "fairseq",
        help=f"how a translation's log-probability is normalised: {LENGTH_PENALTIES}; 'fairseq' divides by "
        "the length to the power of --lenpen",
    )
    coverage_penalty: float = option(
        0.0, help="GNMT's beta: weight of source symbols left unread (paper: 0.2)", low=0
    )
    no_eval_bleu: bool = option(
        False, help="compute no BLEU at validations and show no translation, where a recipe asks for them"
    )
    seed: int = II("common.seed")
    beam_size_threshold: float = option(
        0.0, help="prune candidates that score lower than the best by more than this; 0: keep all", low=0
    )
    subword_sampling: float = option(
        0.0,
        help="subword regularisation: segment the training sentences anew in every epoch, each drawn with "
        "its probability to this power (Kudo 2018: 0.1 to 0.5; smaller is more uniform); 0: off",
        low=0,
    )
    subword_nbest: int = option(
        64,
        help="with --subword-sampling: draw from this many of the likeliest segmentations",
        low=2,
        high=MOST_SEGMENTATIONS,
    )


@register_task("gnmt_translation", dataclass=GNMTTranslationConfig)
class GNMTTranslationTask(LogsDynamics, DetachingTask, TranslationTask):
    """See the module's docstring.

    Attributes:
        pieces_sha256: SHA-256 of the sentencepiece model that segmented the data, as hex; None if the
            data directory does not say.
    """

    cfg: GNMTTranslationConfig

    def __init__(self, cfg, src_dict, tgt_dict):
        super().__init__(cfg, src_dict, tgt_dict)
        self.pieces_sha256 = pieces_sha256(utils.split_paths(cfg.data)[0])
        cfg.eval_bleu = cfg.eval_bleu and not cfg.no_eval_bleu
        if cfg.eval_bleu_remove_bpe is None:
            # BLEU of pieces is not comparable with that of words.
            signs = {"sentencepiece": ("▁", str.startswith), "subword_nmt": ("@@", str.endswith)}
            found = (
                kind for kind, (sign, has) in signs.items() if any(has(s, sign) for s in tgt_dict.symbols)
            )
            cfg.eval_bleu_remove_bpe = next(found, None)
        self._shows = False

    @classmethod
    def setup_task(cls, cfg, **kwargs):
        """Reads the dictionaries.

        Raises:
            UsageError: an option is out of its range, or only one language is given.
        """
        typed_config(cfg, cls).check()
        GNMTScore.parse(cfg.length_penalty, cfg.coverage_penalty, 1.0)
        if cfg.left_pad_target:
            # Prefixes and references are read from the first column on, which would be padding.
            raise UsageError("--left-pad-target: translations are padded on the right here, leave it out")
        if (cfg.source_lang is None) != (cfg.target_lang is None):
            # fairseq would infer both from the data, and ignore the one that was given.
            raise UsageError(
                f"--source-lang {cfg.source_lang} and --target-lang {cfg.target_lang}: give both, or neither"
            )
        # fairseq's default of -1 is no number of copies; it reads it where there are train1 or valid1.
        cfg.upsample_primary = max(cfg.upsample_primary, 1)
        return super().setup_task(cfg, **kwargs)

    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        """Loads a split; ``--subword-sampling`` segments the training split anew in every epoch."""
        super().load_dataset(split, epoch=epoch, combine=combine, **kwargs)
        cfg = self.cfg
        # Programs that evaluate a checkpoint pass its task as ``task_cfg``.
        if split != cfg.train_subset or "task_cfg" in kwargs:
            return
        if cfg.subword_sampling:
            source, target = (
                SegmentationSampler(
                    utils.split_paths(cfg.data)[0], dictionary, cfg.subword_sampling, cfg.subword_nbest
                )
                for dictionary in (self.src_dict, self.tgt_dict)
            )
            self.datasets[split] = SampledPairs(self.datasets[split], source, target, cfg.seed)
        self.datasets[split] = KeyedPairs(self.datasets[split])

    def build_generator(self, models, args, seq_gen_cls=None, extra_gen_cls_kwargs=None, **kwargs):
        """Returns a generator that scores as configured; raises UsageError for invalid values."""
        cfg = self.cfg
        lenpen = 0.0 if getattr(args, "unnormalized", False) else getattr(args, "lenpen", 1)
        score = GNMTScore.parse(cfg.length_penalty, cfg.coverage_penalty, lenpen)
        pruning = self._pruning(score, args, kwargs) if cfg.beam_size_threshold else None
        aligned = getattr(args, "print_alignment", None)
        if aligned is None and getattr(args, "replace_unk", None) is not None:
            aligned = "hard"
        if seq_gen_cls is not None or getattr(args, "score_reference", False):
            return super().build_generator(models, args, seq_gen_cls, extra_gen_cls_kwargs, **kwargs)
        extra = {"gnmt_score": score, "pruning": pruning, "print_alignment": aligned}
        return super().build_generator(
            models, args, GNMTGenerator, extra | (extra_gen_cls_kwargs or {}), **kwargs
        )

    def _pruning(self, score, args, kwargs):
        other = [name for name in OTHER_SEARCHES if getattr(args, name, False) or kwargs.get(name)]
        other += [name for name in DIVERSE_SEARCHES if getattr(args, name, -1) > 0]
        if other:
            raise UsageError(
                "--beam-size-threshold prunes the plain beam search and does not go with "
                f"--{other[0].replace('_', '-')}; leave one of them out"
            )
        return Pruning(self.cfg.beam_size_threshold, score)

    def begin_valid_epoch(self, epoch, model):
        super().begin_valid_epoch(epoch, model)
        self._shows = not dist.is_initialized() or dist.get_rank() == 0

    def inference_step(self, generator, models, sample, prefix_tokens=None, constraints=None):
        """As in fairseq, and logs one translation of each validation that computes BLEU.

        It is always of the same sentence, the last of the first batch, which has the shortest ones.
        """
        found = super().inference_step(generator, models, sample, prefix_tokens, constraints)
        if self._shows:
            self._shows = False
            net_input, translation = sample["net_input"], found[-1][0]["tokens"]
            both = ((self.src_dict, net_input["src_tokens"][-1]), (self.tgt_dict, translation))
            bare = ((words, utils.strip_pad(line, words.pad())) for words, line in both)
            joined = [words.string(line, self.cfg.eval_bleu_remove_bpe) for words, line in bare]
            logger.info("%s -> %s", *joined)
        return found

    def reduce_metrics(self, logging_outputs, criterion):
        """As in fairseq, but translations that are all empty have a BLEU of 0, where fairseq logs none."""
        # The first function that is logged under a name counts.
        if self.cfg.eval_bleu and any("_bleu_sys_len" in log for log in logging_outputs):
            metrics.log_derived("bleu", _bleu)
        super().reduce_metrics(logging_outputs, criterion)

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        # Dropout depends on the batch, not on the worker that has it, so that W workers train what one
        # worker does with --update-freq W.
        torch.manual_seed(pass_seed(self.cfg.seed, update_num, sample.get("key", 0) if sample else 0))
        sample = self._without_prefix(sample, criterion)
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def valid_step(self, sample, model, criterion):
        """As in fairseq, see ``_without_prefix``; an empty share of the batches has no BLEU either."""
        if not sample:
            return 0.0, 0, {}
        return super().valid_step(self._without_prefix(sample, criterion), model, criterion)

    def _without_prefix(self, sample, criterion):
        """Returns the batch with the number of tokens that are scored, by which losses are divided.

        fairseq's number counts those that --ignore-prefix-size leaves out.
        """
        size = getattr(criterion, "ignore_prefix_size", 0)
        if not size or not sample:
            return sample
        scored = sample["target"][:, size:] != self.target_dictionary.pad()
        return sample | {"ntokens": int(scored.sum())}


def _bleu(meters) -> float:
    """Returns BLEU from the sums that fairseq logs."""
    if "_bleu_totals" not in meters:
        return 0.0
    counts, totals, sys_len, ref_len = (
        meters[f"_bleu_{name}"].sum for name in ("counts", "totals", "sys_len", "ref_len")
    )
    score = BLEU.compute_bleu(
        counts.tolist(), totals.tolist(), int(sys_len), int(ref_len), smooth_method="exp"
    )
    return round(score.score, 2)


class SampledPairs(BaseWrapperDataset):
    """fairseq's pairs of sentences, with segmentations that ``SegmentationSampler`` draws.

    Batches are formed by the lengths of the sentences as prepared. The draws depend on the seed, the epoch
    and the pair alone, so they are the same for any number of workers and after any restart.
    """

    def __init__(
        self, pairs: LanguagePairDataset, source: SegmentationSampler, target: SegmentationSampler, seed: int
    ):
        super().__init__(pairs)
        self.samplers = {"source": source, "target": target}
        self.seed = seed
        # In shared memory, because fairseq keeps the processes that load batches for all epochs.
        self.epoch = torch.ones((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch.fill_(epoch)

    def __getitem__(self, index: int) -> dict:
        rng = np.random.default_rng([self.seed, int(self.epoch), int(index)])
        pair = self.dataset[index]
        return pair | {side: sampler.draw(pair[side], rng) for side, sampler in self.samplers.items()}


class KeyedPairs(BaseWrapperDataset):
    """Pairs whose batches have a ``key``, the smallest number of their pairs.

    No other batch of the epoch has it, and unlike the tensor ``id`` it stays on the host.
    """

    def collater(self, samples: list[dict]) -> dict:
        batch = self.dataset.collater(samples)
        return batch and batch | {"key": min(sample["id"] for sample in samples)}
