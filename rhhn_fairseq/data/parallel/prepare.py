"""Prepares parallel text for the training of translation models, stage by stage.

texts: clean the training text; pieces: learn the joint sentencepiece model; binary: cut every sentence
into pieces, in fairseq's binary format. The stages are in a hidden directory beside the destination, which
receives their results in one step when all are done.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rhhn_fairseq.data.common.destination import check_replaceable, one_at_a_time, publish
from rhhn_fairseq.data.common.manifest import describe_file, versions, write_manifest
from rhhn_fairseq.data.parallel.corpora import PARALLEL, Corpus
from rhhn_fairseq.data.parallel.encoding import encode_texts
from rhhn_fairseq.data.parallel.pieces import MODEL_NAME, VOCABULARY_NAME, PiecesConfig, train_pieces
from rhhn_fairseq.data.parallel.stages import Stages, remove_unless_resumable, stages_in
from rhhn_fairseq.data.parallel.texts import RAW, REASONS, CleaningConfig, write_texts
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import count_lines

TEXTS, PIECES, BINARY = "texts", "pieces", "binary"

PACKAGES = ("fairseq", "sentencepiece", "rhhn_fairseq")


@one_at_a_time
def prepare(
    corpus: Corpus,
    dest: str | Path,
    cleaning: CleaningConfig,
    pieces: PiecesConfig,
    workers: int = 1,
    force: bool = False,
    say: Callable[[str], None] = print,
) -> tuple[dict, bool]:
    """Prepares ``corpus`` in the directory ``dest``; returns its manifest, and whether it was there already.

    workers: threads that encode. force: replace what an earlier run left at ``dest``, and
    begin at the first stage. say: called with a message about each stage.

    Raises UsageError for input that is unreadable or does not fit together, for a full disk, and for a
    ``dest`` that holds something else.
    """
    check_options(dest, workers, force)
    work = dest.with_name(f".{dest.name}.work")
    request = {
        "corpus": corpus.name,
        "languages": list(corpus.languages),
        "options": {**corpus.options, **asdict(cleaning), **asdict(pieces)},
        "inputs": _inputs(corpus),
    }
    if not force and (manifest := PARALLEL.reusable(dest, request)) is not None:
        # A run that was killed at its very end leaves them.
        remove_unless_resumable(work, BINARY)
        return manifest, True
    with stages_in(work, say) as stages:
        if force:
            stages.discard()
        manifest = _build(corpus, cleaning, pieces, workers, request, stages)
        write_manifest(stages.folder(BINARY), manifest)
        publish(stages.folder(BINARY), dest)
        stages.discard()
    return manifest, False


def check_options(dest: str | Path, workers: int, force: bool) -> None:
    """Raises UsageError for a number of workers out of range, or a ``dest`` that must not be replaced."""
    if not 1 <= workers <= most_workers():
        raise UsageError(
            f"--workers {workers}: must be 1 or more, and {most_workers()} at most on this machine"
        )
    check_replaceable(dest, force, PARALLEL)


def report(manifest: dict) -> str:
    """Returns two tables: what became of the training pairs, and what each subset holds."""
    columns = ("read", "kept", *REASONS)
    width = max(13, *(len(counts["name"]) for counts in manifest["cleaning"]))
    lines = [f"{'training text':<{width}}" + "".join(f"{column:>12}" for column in columns)]
    for counts in manifest["cleaning"]:
        lines.append(f"{counts['name']:<{width}}" + "".join(f"{counts[key]:>12,}" for key in columns))
    lines.append("")
    lines.append(f"{'subset':<9}{'language':<10}{'sentences':>12}{'tokens':>14}{'unknown':>10}{'empty':>8}")
    for subset, entry in manifest["splits"].items():
        for language, counts in entry["languages"].items():
            lines.append(
                f"{subset:<9}{language:<10}{counts['sentences']:>12,}{counts['tokens']:>14,}"
                f"{counts['unknown']:>10,}{counts['empty']:>8,}  {entry['name']}"
            )
    lines.append("")
    lines.append(f"{manifest['vocab_size']:,} dictionary entries, pieces {manifest['pieces_sha256']}")
    return "\n".join(lines)


def _build(
    corpus: Corpus,
    cleaning: CleaningConfig,
    pieces: PiecesConfig,
    workers: int,
    request: dict,
    stages: Stages,
) -> dict:
    """Runs the stages and collects the destination's files in the last one's folder; returns the manifest."""
    languages = corpus.languages
    texts = stages.run(
        TEXTS,
        {
            **{key: request[key] for key in ("corpus", "languages", "inputs")},
            "options": {**corpus.options, **asdict(cleaning)},
            "versions": versions(*PACKAGES),
        },
        lambda folder: write_texts(corpus, cleaning, folder),
    )
    folder = stages.folder(TEXTS)
    subsets = {"train": {language: folder / f"train.{language}" for language in languages}}
    for subset in texts["evaluation"]:
        subsets[subset] = {language: folder / RAW / f"{subset}.{language}" for language in languages}
    pairs = sum(counts["kept"] for counts in texts["cleaning"])
    learnt = stages.run(
        PIECES,
        asdict(pieces),
        lambda folder: train_pieces(list(subsets["train"].values()), pairs, pieces, folder),
    )
    # The list lacks fairseq's <pad>.
    vocab_size = 1 + count_lines(stages.folder(PIECES) / VOCABULARY_NAME)
    if vocab_size < pieces.vocab_size:
        stages.say(f"--vocab-size {pieces.vocab_size}: the text is too small for it, {vocab_size} is taken")
    counts = stages.run(
        BINARY, {}, lambda folder: encode_texts(subsets, stages.folder(PIECES), folder, workers)
    )
    return {
        "format": PARALLEL.format,
        "kind": PARALLEL.kind,
        "corpus": corpus.name,
        "source_lang": corpus.source_lang,
        "target_lang": corpus.target_lang,
        "vocab_size": vocab_size,
        "pieces_sha256": stages.files(PIECES)[MODEL_NAME]["sha256"],
        "pieces_learnt_from": learnt["sentences"],
        "cleaning": texts["cleaning"],
        "splits": _splits(texts, counts),
        "request": request,
        "files": _gather(stages),
        "versions": versions(*PACKAGES),
    }


def _splits(texts: dict, counts: dict) -> dict:
    """Returns each subset's name and, by language, its sentences, tokens, unknown tokens and empty lines."""
    training = {"name": " + ".join(text["name"] for text in texts["cleaning"]), "empty": {}}
    splits = {}
    for subset, languages in counts.items():
        text = texts["evaluation"].get(subset, training)
        counted = {key: {**entry, "empty": text["empty"].get(key, 0)} for key, entry in languages.items()}
        splits[subset] = {"name": text["name"], "languages": counted}
    return splits


def _gather(stages: Stages) -> dict[str, dict]:
    """Copies the small files of earlier stages to the binary ones; returns size and SHA-256 of all files."""
    files = dict(stages.files(BINARY))
    folder = stages.folder(BINARY)
    (folder / RAW).mkdir(exist_ok=True)
    raw = {name: entry for name, entry in stages.files(TEXTS).items() if name.startswith(f"{RAW}/")}
    for stage, wanted in ((TEXTS, raw), (PIECES, stages.files(PIECES))):
        for name, entry in wanted.items():
            shutil.copyfile(stages.folder(stage) / name, folder / name)
            files[name] = entry
    return files


def _inputs(corpus: Corpus) -> list[dict]:
    """Returns name, size and SHA-256 of each text's file; an archive with several texts is read once."""
    checksums = dict(corpus.known_files)
    inputs = []
    for split, groups in (("train", corpus.train), *corpus.evaluation_sets().items()):
        for pairs in groups:
            for language, text in zip(corpus.languages, pairs.texts, strict=bool(pairs.texts)):
                if text.path not in checksums:
                    checksums[text.path] = describe_file(text.path)
                entry = {"split": split, "language": language, "name": Path(text.name).name}
                inputs.append(entry | checksums[text.path])
    return inputs


def most_workers() -> int:
    """Returns the limit of ``workers``: more threads only wait for each other."""
    return max(16, 4 * (os.cpu_count() or 1))
