"""A training that learns from an ensemble's predictions (Hinton et al. 2015; Kim and Rush 2016, word level).

The ensemble reads the training text once, with its dropout, and the likeliest pieces at every position are
kept. The criterion ``distilled`` reads them; this is a folder for ``--user-dir``::

    python -m experiments.distilled DATA FIRST.pt SECOND.pt --output teacher.pt
    fairseq-train DATA --user-dir experiments/distilled --criterion distilled --teacher teacher.pt ...
"""

import argparse
from dataclasses import dataclass, field

import torch
from fairseq import checkpoint_utils
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    label_smoothed_nll_loss,
)
from fairseq.dataclass import FairseqDataclass
from omegaconf import II
from torch import Tensor, nn
from tqdm import tqdm

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)

KEPT, PASSES = 48, 2
"""Pieces kept at a position, and passes of each model, of other dropout."""


@dataclass
class DistilledConfig(FairseqDataclass):
    """Options of the criterion."""

    label_smoothing: float = field(default=0.0, metadata={"help": "epsilon of label smoothing"})
    teacher: str = field(default="", metadata={"help": "file of predictions"})
    teacher_weight: float = field(default=0.5, metadata={"help": "share of the predictions in the loss"})
    sentence_avg: bool = II("optimization.sentence_avg")


@register_criterion("distilled", dataclass=DistilledConfig)
class Distilled(LabelSmoothedCrossEntropyCriterion):
    """(1 - w) times the label-smoothed cross-entropy, and w times that against the teacher's predictions."""

    def __init__(self, task, sentence_avg, label_smoothing, teacher, teacher_weight):
        super().__init__(task, sentence_avg, label_smoothing)
        self.weight, self.teacher = teacher_weight, torch.load(teacher, weights_only=True)

    def compute_loss(self, model, net_output, sample, reduce=True):
        if not torch.is_grad_enabled():
            return super().compute_loss(model, net_output, sample, reduce)
        log_p, target = self.get_lprobs_and_target(model, net_output, sample)
        real = target.ne(self.padding_idx)
        log_p, target = log_p[real], target[real]
        loss, nll = label_smoothed_nll_loss(log_p, target, self.eps)
        rows = rows_of(sample["id"], self.teacher["start"])
        p, pieces = self.teacher["p"][rows].to(log_p), self.teacher["pieces"][rows].to(target)
        return (1 - self.weight) * loss - self.weight * (p * log_p.gather(1, pieces)).sum(), nll


def rows_of(sentences: Tensor, start: Tensor) -> Tensor:
    """Returns the rows of all positions of sentences [B]; those of sentence i begin at start[i]."""
    return torch.cat([torch.arange(start[i], start[i + 1]) for i in sentences.tolist()])


@torch.no_grad()
def predictions(models: list[nn.Module], task, max_tokens: int = 2000) -> dict[str, Tensor]:
    """Returns the KEPT likeliest pieces of N positions of the training text, and their mean probabilities.

    Returns:
        ``start`` [sentences + 1], ``pieces`` [N, KEPT] in int16, and ``p`` [N, KEPT], which add up to 1.
    """
    data, pad = task.dataset("train"), task.target_dictionary.pad()
    lengths = torch.tensor([len(data[i]["target"]) for i in range(len(data))])
    start = nn.functional.pad(lengths.cumsum(0), (1, 0))
    pieces = torch.zeros(int(start[-1]), KEPT, dtype=torch.int16)
    kept = torch.zeros(int(start[-1]), KEPT, dtype=torch.float16)
    batches = task.get_batch_iterator(data, max_tokens=max_tokens).next_epoch_itr(shuffle=False)
    for sample in tqdm(batches, unit="batch"):
        real, total = sample["target"] != pad, torch.zeros(())
        for model in models:
            for _ in range(PASSES):
                output = model.train()(**sample["net_input"])
                total = total + model.get_normalized_probs(output, log_probs=False)[real]
        p, rows = total.topk(KEPT), rows_of(sample["id"], start)
        pieces[rows], kept[rows] = p.indices.short(), (p.values / p.values.sum(1, keepdim=True)).half()
    return {"start": start, "pieces": pieces, "p": kept}


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="the prepared corpus")
    parser.add_argument("models", nargs="+", help="checkpoints of the ensemble")
    parser.add_argument("--output", required=True, help="file of predictions")
    args = parser.parse_args(argv)
    torch.manual_seed(1)
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(args.models, {"data": args.data})
    task.load_dataset("train")
    torch.save(predictions(models, task), args.output)


if __name__ == "__main__":
    main()
