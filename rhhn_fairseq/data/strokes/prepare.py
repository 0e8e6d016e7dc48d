"""Prepares a corpus of handwriting: cleans, measures and writes it, completely or not at all."""

import dataclasses
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.common.destination import check_replaceable, make_once, one_at_a_time
from rhhn_fairseq.data.strokes.cleaning import REASONS, CleaningConfig, clean
from rhhn_fairseq.data.strokes.normalisation import Normalisation
from rhhn_fairseq.data.strokes.points import Line, Loaded, StrokeCorpus
from rhhn_fairseq.data.strokes.store import STROKES, StrokeManifest, write_split
from rhhn_fairseq.errors import UsageError


@one_at_a_time
def prepare(
    corpus: StrokeCorpus,
    dest: str | Path,
    cleaning: CleaningConfig,
    normalise: str = "standard",
    statistics_of: str | Path | None = None,
    force: bool = False,
) -> tuple[dict, bool]:
    """Prepares ``corpus`` in the directory ``dest``; returns its manifest, and whether it was there already.

    Args:
        cleaning: what is corrected and dropped.
        normalise: how offsets are normalised, see ``Normalisation.measure``; measured on the training lines.
        statistics_of: a prepared directory whose statistics are used instead, so that models and figures of
            the two can be compared.
        force: replace what an earlier run left at ``dest``.

    Raises:
        UsageError: input that is unreadable, damaged, or leaves a split without lines; a ``dest`` that holds
            something else.
    """
    check_replaceable(dest, force, STROKES)
    # Before the corpus is read, which may take minutes.
    given = None if statistics_of is None else StrokeManifest.load(statistics_of).normalisation
    loaded = corpus.load()
    request = {
        "corpus": corpus.name,
        "options": corpus.options,
        "cleaning": dataclasses.asdict(cleaning),
        "normalise": normalise,
        "statistics": None if given is None else {"mean": list(given.mean), "std": list(given.std)},
        "inputs": loaded.inputs,
    }
    return make_once(
        STROKES,
        dest,
        request,
        force,
        ("rhhn_fairseq",),
        lambda stage: _build(corpus, loaded, normalise, cleaning, given, stage),
    )


def report(manifest: dict) -> str:
    """Returns a table of the prepared and the dropped lines, and the name of the corpus."""
    lines = [f"{'split':<6} {'lines':>8} {'points':>11} {'with text':>9} {'dropped':>8} {'outliers':>8}"]
    for split, counts in manifest["splits"].items():
        dropped = sum(counts["dropped"].values())
        lines.append(
            f"{split:<6} {counts['lines']:>8,} {counts['points']:>11,} {counts['with_text']:>9,} "
            f"{dropped:>8,} {counts['outliers']:>8,}"
        )
    for split, counts in manifest["splits"].items():
        reasons = [f"{number:,} {reason}" for reason, number in counts["dropped"].items() if number]
        if reasons:
            lines.append(f"dropped from {split}: {', '.join(reasons)}")
    lines += [f"{words}: {number:,}" for words, number in manifest["notes"].items() if number]
    mean, std = manifest["statistics"]["mean"], manifest["statistics"]["std"]
    lines.append(
        f"offsets: mean ({mean[0]:.4g}, {mean[1]:.4g}), standard deviation ({std[0]:.4g}, {std[1]:.4g})"
    )
    lines.append(manifest["variant"])
    return "\n".join(lines)


def _build(corpus, loaded: Loaded, normalise: str, cleaning, given, stage: Path) -> dict:
    splits, counts = {}, {}
    for split, lines in loaded.splits.items():
        splits[split], counts[split] = _clean(lines, cleaning)
    for split in ("train", "valid", *splits):
        if not splits.get(split):
            dropped = {reason: n for reason, n in counts.get(split, {}).get("dropped", {}).items() if n}
            raise UsageError(
                f"the {split} split has no lines, dropped were {dropped or 'none'}; "
                "see --min-points, --max-points and --scale"
            )
    train = splits["train"]
    normalisation = given
    if normalisation is None:
        offsets = np.concatenate([line.points[1:, :2] for line in train])
        normalisation = Normalisation.measure(offsets, normalise)
    for split, lines in splits.items():
        write_split(stage, split, lines)
    symbols = "".join(sorted({symbol for line in train for symbol in line.text or ""}))
    written = [line for line in train if line.text]
    letters = sum(len(line.text) for line in written)
    return {
        "variant": corpus.variant,
        "symbols": symbols,
        "points_per_symbol": sum(len(line.points) for line in written) / letters if letters else 0.0,
        "statistics": {"mean": list(normalisation.mean), "std": list(normalisation.std)},
        "splits": counts,
        "notes": loaded.notes,
    }


def _clean(lines: list[Line], config: CleaningConfig) -> tuple[list[Line], dict]:
    kept, outliers, dropped = [], 0, dict.fromkeys(REASONS, 0)
    for line in lines:
        points, outside = clean(line, config)
        outliers += outside
        if isinstance(points, str):
            dropped[points] += 1
            continue
        # Points are stored in float32, which is narrower than the input.
        with np.errstate(over="ignore"):
            stored = points.astype(np.float32)
        if not np.isfinite(stored).all():
            raise UsageError(f"{line.name}: has offsets of more than 3e38, too large to be stored")
        kept.append(dataclasses.replace(line, points=points))
    counts = {
        "lines": len(kept),
        "points": sum(len(line.points) for line in kept),
        "with_text": sum(bool(line.text) for line in kept),
        "outliers": outliers,
        "dropped": dropped,
    }
    return kept, counts
