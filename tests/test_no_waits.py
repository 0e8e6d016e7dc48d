"""Nothing inside a training batch makes the host wait for a GPU.

Every operation that hands a value or a data-dependent shape to Python is noticed where it is asked for. That
is seen on the CPU, with tensors that say of themselves that they are on a GPU.
"""

import traceback
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny_char_lm
import tiny_handwriting
import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY
from torch.utils._python_dispatch import TorchDispatchMode

from rhhn_fairseq.cells.registry import CELLS, cell_options
from rhhn_fairseq.criterions.chunked_cross_entropy import ChunkedCrossEntropy
from rhhn_fairseq.criterions.mixture_density import MixtureDensity
from rhhn_fairseq.criterions.problem_loss import ProblemLoss
from rhhn_fairseq.kernels.programs import PROGRAMS
from rhhn_fairseq.models.classifier import Classifier, ClassifierConfig
from rhhn_fairseq.models.gnmt import GNMT, GNMTConfig
from rhhn_fairseq.tasks.synthetic import SyntheticTask, SyntheticTaskConfig

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.is_nonzero,
    aten._unique2,
}
NOISE = dict(gal_dropout=0.2, recurrent_dropout=0.3, zoneout=0.1, h_detach=0.5)
SMALL = dict(hyper_size=4, hyper_embed_size=2, rhn_depth=2)


class Waits(TorchDispatchMode):
    """Collects the lines of this package that ask for a value."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        asks = function.overloadpacket in WAITS
        if function.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            asks = any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1])
        if asks:
            frames = [f for f in traceback.extract_stack() if "rhhn_fairseq/" in f.filename]
            self.lines += [f"{f.filename}:{f.lineno} {f.line}" for f in frames[-1:]] or ["elsewhere"]
        return function(*args, **kwargs or {})


def lines_that_wait(model, criterion, sample) -> list[str]:
    """Of a forward and a backward pass in training."""
    model.train()
    with mock.patch.object(torch.Tensor, "is_cuda", True, create=True), Waits() as waits:
        loss = criterion(model, sample)[0]
        loss.backward()
    return waits.lines


def options_of(cell: str) -> dict:
    known = cell_options(cell)
    return {name: value for name, value in (SMALL | NOISE).items() if name in known}


@pytest.mark.parametrize("ask", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: bool((x > 0).all())])
def test_a_look_at_a_value_is_noticed(ask):
    with Waits() as waits:
        ask(torch.ones(3))
    assert waits.lines == ["elsewhere"]


LOOPS = [(name, "reference") for name in CELLS]
WHOLE = [(name, "aten") for name, entry in CELLS.items() if entry.cell in PROGRAMS]


@pytest.mark.parametrize("cell, backend", LOOPS + WHOLE)
def test_char_lm(cell, backend, char_task, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", backend)
    config = MODEL_DATACLASS_REGISTRY["char_lm"](cell=cell, hidden_size=8, **options_of(cell))
    model = tiny_char_lm.MODEL_REGISTRY["char_lm"].build_model(config, char_task)
    sample = next(tiny_char_lm.iterator(char_task).next_epoch_itr())
    criterion = CRITERION_REGISTRY["char_cross_entropy"](char_task)
    assert lines_that_wait(model, criterion, sample) == []


@pytest.fixture(scope="module")
def char_task(tmp_path_factory):
    return tiny_char_lm.build_task(tiny_char_lm.write_corpus(tmp_path_factory.mktemp("corpus")))


@pytest.mark.parametrize("problem", ["copying", "adding", "xor", "digits"])
def test_problems(problem, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", "reference")
    values = dict(problem=problem, seed=1, train_subset="train", update_freq=[1], epoch_updates=2)
    task = SyntheticTask.setup_task(SyntheticTaskConfig(**values))
    model = Classifier(ClassifierConfig(cell="lstm", hidden_size=8, h_detach=0.5), task.problem)
    task.load_dataset("train")
    batches = task.get_batch_iterator(task.dataset("train"), max_sentences=4)
    assert lines_that_wait(model, ProblemLoss(task), next(batches.next_epoch_itr())) == []


@pytest.mark.parametrize("window", [0, 2])
def test_handwriting(window, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", "reference")
    model = tiny_handwriting.build("ln_hyperlstm", window=window)
    mask = torch.arange(9) < torch.tensor([[9], [5], [7]])
    text = {"text": torch.tensor([[0, 1], [2, 3], [1, 1]])} if window else {}
    sample = {
        "net_input": {"points": _points(3, 9), "mask": mask, **text},
        "target": _points(3, 9),
        "ntokens": 21,
        "nsentences": 3,
    }
    assert lines_that_wait(model, MixtureDensity(None, "point"), sample) == []


def _points(B, T):
    points = torch.randn(B, T, 3)
    points[..., 2] = (points[..., 2] > 1).float()
    return points


@pytest.mark.parametrize("attention", ["paper", "v2"])
@pytest.mark.parametrize("cell", ["lstm", "ln_hyperlstm", "hyperrhn"])
def test_translation(cell, attention, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", "reference")
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
    criterion = ChunkedCrossEntropy(task, sentence_avg=False, label_smoothing=0.1, output_chunk=2)
    assert lines_that_wait(model, criterion, sample) == []
