"""Small models of every family, each with its criterion and a batch to train on."""

from types import SimpleNamespace

import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY

from helpers import tiny_char_lm, tiny_handwriting
from rhhn_fairseq.cells.registry import cell_options
from rhhn_fairseq.criterions.chunked_cross_entropy import ChunkedCrossEntropy
from rhhn_fairseq.criterions.mixture_density import MixtureDensity
from rhhn_fairseq.criterions.problem_loss import ProblemLoss
from rhhn_fairseq.models.classifier import Classifier, ClassifierConfig
from rhhn_fairseq.models.gnmt import GNMT, GNMTConfig
from rhhn_fairseq.tasks.synthetic import SyntheticTask, SyntheticTaskConfig

NOISE = dict(gal_dropout=0.2, recurrent_dropout=0.3, zoneout=0.1, h_detach=0.5)
SMALL = dict(hyper_size=4, hyper_embed_size=2, rhn_depth=2)


def options_of(cell: str) -> dict:
    known = cell_options(cell)
    return {name: value for name, value in (SMALL | NOISE).items() if name in known}


def char_lm(cell, task):
    config = MODEL_DATACLASS_REGISTRY["char_lm"](cell=cell, hidden_size=8, **options_of(cell))
    model = tiny_char_lm.MODEL_REGISTRY["char_lm"].build_model(config, task)
    sample = next(tiny_char_lm.iterator(task).next_epoch_itr())
    return model, CRITERION_REGISTRY["char_cross_entropy"](task), sample


def problem(name, cell="lstm"):
    values = dict(problem=name, seed=1, train_subset="train", update_freq=[1])
    task = SyntheticTask.setup_task(SyntheticTaskConfig(**values))
    model = Classifier(ClassifierConfig(cell=cell, hidden_size=8, **options_of(cell)), task.problem)
    task.load_dataset("train")
    batches = task.get_batch_iterator(task.dataset("train"), max_sentences=4, grouped_shuffling=False)
    return model, ProblemLoss(task), next(batches.next_epoch_itr())


def handwriting(window, cell="ln_hyperlstm"):
    model = tiny_handwriting.build(cell, window=window)
    mask = torch.arange(9) < torch.tensor([[9], [5], [7]])
    text = {"text": torch.tensor([[0, 1], [2, 3], [1, 1]])} if window else {}
    sample = {
        "net_input": {"points": _points(3, 9), "mask": mask, **text},
        "target": _points(3, 9),
        "ntokens": 21,
        "nsentences": 3,
    }
    return model, MixtureDensity(None, "point"), sample


def _points(B, T):
    points = torch.randn(B, T, 3)
    points[..., 2] = (points[..., 2] > 1).float()
    return points


def translation(cell, attention):
    words = Dictionary()
    for n in range(20):
        words.add_symbol(f"w{n}")
    task = SimpleNamespace(
        source_dictionary=words,
        target_dictionary=words,
        cfg=SimpleNamespace(left_pad_target=False),
        pieces_sha256=None,
    )
    sizes = dict(hidden_size=8, embed_dim=6, encoder_layers=2, decoder_layers=2)
    model = GNMT.build_model(GNMTConfig(cell=cell, attention=attention, **sizes, **options_of(cell)), task)
    pad, eos = words.pad(), words.eos()
    sample = {
        "net_input": {
            "src_tokens": torch.tensor([[pad, pad, 5, 6, eos], [7, 8, 9, 4, eos]]),
            "src_lengths": torch.tensor([3, 5]),
            "prev_output_tokens": torch.tensor([[eos, 5, 6], [eos, 9, pad]]),
        },
        "target": torch.tensor([[5, 6, eos], [9, eos, pad]]),
        "ntokens": 5,
        "nsentences": 2,
    }
    return model, ChunkedCrossEntropy(task, sentence_avg=False, label_smoothing=0.1, output_chunk=2), sample


FAMILIES = ("copying", "digits", "handwriting", "lstm paper", "lstm v2", "hyperrhn paper", "hyperrhn v2")
"""Models beside character models: of problems, handwriting and translation, by cell and attention."""


def of_family(name):
    if name == "handwriting":
        return handwriting(2)
    return translation(*name.split()) if " " in name else problem(name)
