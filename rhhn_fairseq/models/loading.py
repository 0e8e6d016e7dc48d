"""Loading trained models for use outside of fairseq's own programs."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq import checkpoint_utils, utils
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY, FairseqEncoderDecoderModel
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.translation import TranslationTask
from sentencepiece import SentencePieceProcessor

from rhhn_fairseq.compat.command_line import check_ensemble
from rhhn_fairseq.data.parallel.pieces import MODEL_NAME
from rhhn_fairseq.data.strokes.normalisation import Normalisation
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.char_lm import CharLM
from rhhn_fairseq.models.gnmt import check_pieces
from rhhn_fairseq.models.handwriting import Handwriting
from rhhn_fairseq.saving import read_weights, weight_problem


def load_char_lm(path: str, data: str | None = None):
    """Returns a trained character language model and its task, on the CPU in evaluation mode.

    Args:
        path: the checkpoint. data: the data directory; None takes the symbols that the checkpoint holds, or
            for older ones the directory it was trained with.

    Raises:
        UsageError: no such file, not a checkpoint of a character language model, or other symbols.
    """
    overrides = {} if data is None else {"data": data}
    state = checkpoint_utils.load_checkpoint_to_cpu(path, overrides) if os.path.isfile(path) else None
    own = TASK_REGISTRY["char_lm"].of_checkpoint(state) if state is not None and data is None else None
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([path], overrides, own, state=state)
    if not isinstance(model, CharLM):
        raise UsageError(f"{path} holds a {type(model).__name__}, not a character language model")
    return model.eval(), task


def load_weights(path: str) -> dict[str, torch.Tensor]:
    """Returns by name the weights of any checkpoint, or of a directory that ``rhhn convert`` wrote.

    Raises:
        UsageError: no such file, or not a checkpoint.
    """
    if os.path.isdir(path):
        return read_weights(Path(path))
    return checkpoint_utils.load_checkpoint_to_cpu(path)["model"]


def initial_char_lm(path: str, data: str | None = None, seed: int = 1) -> CharLM:
    """Returns a checkpoint's model as it is before training with this seed, in evaluation mode.

    Raises:
        UsageError: as ``load_char_lm``.
    """
    _, task = load_char_lm(path, data)
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.build_model(state["cfg"]["model"]).eval()


def updates_of(path: str) -> int:
    """Returns the number of updates after which a checkpoint was saved."""
    history = checkpoint_utils.load_checkpoint_to_cpu(path)["optimizer_history"]
    return history[-1]["num_updates"]


def beginning_of(task, split: str, symbols: int) -> list[int]:
    """Returns the dictionary indices of a model's first input and of the first symbols of a split.

    Args:
        task: a ``CharLMTask``.

    Raises:
        UsageError: the data has no such split.
    """
    return [task.first_input, *task.open_split(split)[:symbols].tolist()]


def lines_of(task, split: str, lines: int, symbols: int) -> torch.Tensor:
    """Returns lines [symbols, lines] of a split as dictionary indices, evenly spaced over all of it.

    Raises:
        UsageError: the data has no such split, or it is too short.
    """
    stream = task.open_split(split)
    if len(stream) < lines * symbols:
        raise UsageError(
            f"the split {split} of {task.cfg.data} has {len(stream):,} symbols, too few for {lines} lines of "
            f"{symbols}: give fewer --lines or --steps, or another --data"
        )
    starts = [number * (len(stream) // lines) for number in range(lines)]
    columns = [torch.tensor(stream[start : start + symbols].tolist()) for start in starts]
    return torch.stack(columns, dim=1)


def load_handwriting(path: str) -> tuple[Handwriting, str | None]:
    """Returns a trained handwriting model, on the CPU in evaluation mode, and its training data directory.

    The directory is not read: the weights hold what the model needs of it.

    Raises:
        UsageError: no such file, or not a checkpoint of a handwriting model.
    """
    state = checkpoint_utils.load_checkpoint_to_cpu(path)
    weights, stored = state["model"], (state.get("cfg") or {}).get("task") or {}
    name = ((state.get("cfg") or {}).get("model") or {}).get("_name")
    kind = MODEL_REGISTRY.get(name) or ARCH_MODEL_REGISTRY.get(name) or object
    if "statistics" not in weights or not issubclass(kind, Handwriting):
        raise UsageError(f"{path} holds no handwriting model")
    manifest = SimpleNamespace(
        normalisation=Normalisation.from_bits(weights["statistics"].numpy()),
        symbols="".join(map(chr, weights["symbol_codes"].tolist())),
        points_per_symbol=0.0,
    )
    task = TASK_REGISTRY["handwriting"](stored, manifest)
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path], task=task, state=state)
    return model.float().eval(), stored.get("data")


@dataclass(frozen=True)
class TranslationModels:
    """Models on the CPU whose probabilities are averaged, their task, and the pieces of their text."""

    models: list[FairseqEncoderDecoderModel]
    task: TranslationTask
    pieces: SentencePieceProcessor


def load_translation_models(
    checkpoints: Sequence[str],
    data: str | None = None,
    sentencepiece_model: str | None = None,
    task_options: Mapping[str, object] | None = None,
) -> TranslationModels:
    """Loads one checkpoint, or several with the same dictionaries.

    Args:
        checkpoints: their files.
        data: directory with the dictionaries, None for the one the first checkpoint was trained with.
        sentencepiece_model: None for ``pieces.model`` in that directory.
        task_options: fields of the task's configuration to set, such as ``coverage_penalty``.

    Raises:
        UsageError: a file does not fit the others, or the task lacks an option. OSError: one is missing.
    """
    options = dict(task_options or {})
    check_ensemble(checkpoints)
    overrides = options if data is None else {**options, "data": data}
    task, models = None, []
    for checkpoint in checkpoints:
        # The task of an earlier model of the ensemble is kept.
        (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
            [checkpoint], arg_overrides=overrides, task=task
        )
        if not (isinstance(model, FairseqEncoderDecoderModel) and isinstance(task, TranslationTask)):
            raise UsageError(f"{checkpoint} holds a {type(model).__name__}, not a translation model")
        # Those of fairseq's own are not checked when they are loaded.
        for name, weight in model.state_dict().items():
            if problem := weight_problem(name, weight):
                raise UsageError(f"{checkpoint}: {name} {problem}")
        models.append(model)
    for name, value in options.items():
        if not hasattr(task.cfg, name):
            raise UsageError(
                f"--{name.replace('_', '-')} {value}: the task of {checkpoints[0]} has no such option, "
                "only a model trained with --task gnmt_translation can be searched with it"
            )
    directory = utils.split_paths(task.cfg.data)[0]
    path = Path(sentencepiece_model or Path(directory) / MODEL_NAME)
    pieces, content = SentencePieceProcessor(), path.read_bytes()
    # Given to the constructor, an empty model would be no error.
    pieces.LoadFromSerializedProto(content)
    fingerprint = torch.tensor(list(hashlib.sha256(content).digest()))
    for model in models:
        check_pieces(getattr(model, "pieces_sha256", None), fingerprint, path)
    for dictionary in (task.source_dictionary, task.target_dictionary):
        check_dictionary(dictionary, directory, pieces, path)
    return TranslationModels(models, task, pieces)


def check_dictionary(dictionary, directory: str, pieces: SentencePieceProcessor, path: Path) -> None:
    """Refuses pieces that the dictionary was evidently not made from; many checkpoints have no fingerprint.

    fairseq-preprocess also adds characters that the pieces lack to a dictionary, so some of its entries may
    not be pieces.

    Raises:
        UsageError: most entries of the dictionary are not pieces.
    """
    known = {pieces.id_to_piece(index) for index in range(pieces.get_piece_size())}
    # Four special symbols come first; fairseq fills up to a multiple of eight with made-up words.
    entries = [word for word in dictionary.symbols[dictionary.nspecial :] if "madeupword" not in word]
    strange = sum(word not in known for word in entries)
    if strange > len(entries) / 2:
        raise UsageError(
            f"{path} is not the sentencepiece model of the dictionary in {directory}: {strange} of its "
            f"{len(entries)} entries are not pieces of it; name the right one with --sentencepiece-model"
        )
