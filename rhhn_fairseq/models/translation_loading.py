"""Trained translation models with what they need to read and write raw text, checked to fit together."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from fairseq import checkpoint_utils, utils
from fairseq.models import FairseqEncoderDecoderModel
from fairseq.tasks.translation import TranslationTask
from sentencepiece import SentencePieceProcessor

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.saving import weight_problem

PIECES_NAME = "pieces.model"


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
        UsageError: a file is missing or does not fit the others, or the task lacks an option.
    """
    options = dict(task_options or {})
    overrides = options if data is None else {**options, "data": data}
    task, models = None, []
    for checkpoint in checkpoints:
        model, task = _load(checkpoint, overrides, task)
        models.append(model)
    for name, value in options.items():
        if not hasattr(task.cfg, name):
            raise UsageError(
                f"--{name.replace('_', '-')} {value}: the task of {checkpoints[0]} has no such option, "
                "only a model trained with --task gnmt_translation can be searched with it"
            )
    directory = utils.split_paths(task.cfg.data)[0]
    path = Path(sentencepiece_model or Path(directory) / PIECES_NAME)
    pieces, fingerprint = load_pieces(path)
    for checkpoint, model in zip(checkpoints, models, strict=True):
        check_fingerprint(model, checkpoint, fingerprint, path)
    check_dictionary(task.source_dictionary, directory, pieces, path)
    return TranslationModels(models, task, pieces)


def _load(checkpoint: str, overrides: dict, task):
    """Returns a model and its task; the task of an earlier model of the ensemble is kept."""
    try:
        (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
            [checkpoint], arg_overrides=overrides, task=task
        )
    except OSError as error:
        if error.filename is None:
            # fairseq's own error for a checkpoint that is missing.
            raise UsageError(str(error)) from error
        raise UsageError(
            f"{error.filename}: cannot be read ({error.strerror}), but {checkpoint} needs it; name the "
            "directory of its dictionaries with --data"
        ) from error
    except UsageError:
        raise
    except Exception as error:
        reason = str(error)
        # PyTorch lists every parameter that does not fit, one a line; fairseq raises a plain Exception.
        if reason.startswith("Error(s) in loading state_dict"):
            raise UsageError(
                f"checkpoint {checkpoint} does not fit these dictionaries or this version: "
                f"{reason.splitlines()[1].strip()}"
            ) from error
        if reason.startswith("Could not infer language pair"):
            raise UsageError(
                f"checkpoint {checkpoint} does not record its languages, and "
                f"{overrides.get('data', 'its data')} has no files that name them: "
                "give --source-lang and --target-lang"
            ) from error
        raise
    if not (isinstance(model, FairseqEncoderDecoderModel) and isinstance(task, TranslationTask)):
        raise UsageError(f"{checkpoint} holds a {type(model).__name__}, not a translation model")
    for name, weight in model.state_dict().items():
        if problem := weight_problem(name, weight):
            raise UsageError(f"checkpoint {checkpoint}: {name} {problem}")
    return model, task


def load_pieces(path: Path) -> tuple[SentencePieceProcessor, str]:
    """Returns a sentencepiece model and the SHA-256 of its file in hexadecimal digits.

    Raises:
        UsageError: there is no such file, or it is not a sentencepiece model.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}); name the sentencepiece model with "
            "--sentencepiece-model"
        ) from error
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise UsageError(f"{path}: is not a sentencepiece model") from error
    return processor, hashlib.sha256(content).hexdigest()


def check_fingerprint(model: torch.nn.Module, checkpoint: str, fingerprint: str, path: Path) -> None:
    """Compares a sentencepiece model with the one that a model was trained with.

    The latter's SHA-256 is the buffer ``pieces_sha256``, 32 byte values, if it exists and is not zero.

    Raises:
        UsageError: they differ.
    """
    stored = getattr(model, "pieces_sha256", None)
    if stored is None or not stored.any():
        return
    trained_with = bytes(stored.tolist()).hex()
    if trained_with != fingerprint:
        raise UsageError(
            f"{path} is not the sentencepiece model that {checkpoint} was trained with: its SHA-256 is "
            f"{fingerprint}, the checkpoint's {trained_with}; name the right one with --sentencepiece-model"
        )


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
