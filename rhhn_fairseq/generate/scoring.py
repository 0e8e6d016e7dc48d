"""Scores of translations: sacreBLEU and chrF with signatures, and tokenised BLEU as the papers print it.

sacreBLEU's figures are of detokenised text; their signatures say how they were computed, and figures with the
same signature may be compared. The papers tokenised hypotheses and references with the Moses scripts and
scored them with its multi-bleu.perl; that figure depends on the tokeniser and is on another scale, so it
always carries a label that says so.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from unittest import mock

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest
from sacremoses import MosesTokenizer
from sacremoses.corpus import NonbreakingPrefixes

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import read_lines

TOKENISED_NOTE = "tokenised BLEU, comparable with the papers' figures, not with sacreBLEU's"

# What fairseq-generate prints: S source, T reference, H and D hypothesis before and after detokenisation,
# each with its score, P the scores of the pieces.
GENERATED = re.compile(r"([STP]|[HD](?=-\d+\t\S+\t))-(\d+)\t(.*)", re.DOTALL)
WORD_BEGINS = "\u2581"
# subword-nmt's sign that the word goes on in the next piece.
WORD_GOES_ON = re.compile(r"(?<=\S)@@( |$)")
UNKNOWN = "<<unk>>"


@dataclass(frozen=True)
class Translations:
    """The output of one system.

    Attributes:
        name: the file it comes from.
        hypotheses: one per sentence, in the order of the source.
        references: what fairseq-generate printed beside them, or None.
    """

    name: str
    hypotheses: list[str]
    references: list[str] | None = None


def read_translations(path: str) -> Translations:
    """Reads one hypothesis per line, or the output of fairseq-generate.

    That output has an H or D line and the P line of the same sentence, or nothing but numbered lines, as grep
    leaves them. Any other line that looks numbered is text. Pieces are joined, see ``join_pieces``.

    Raises:
        UsageError: the file is empty, not UTF-8, or lacks or repeats a sentence.
    """
    lines = read_lines(path)
    matches = [match for match in map(GENERATED.fullmatch, lines) if match]
    translated = {match[2] for match in matches if match[1] in "HD"}
    scored = {match[2] for match in matches if match[1] == "P"}
    if translated & scored or (translated and len(matches) == len(lines)):
        return parse_generated(lines, path)
    return Translations(path, join_pieces(lines))


def parse_generated(lines: Sequence[str], name: str) -> Translations:
    """Returns the best hypothesis of every sentence, and the references, from fairseq-generate's output.

    There sentences are ordered by length; here they are in the order of their numbers. Of several hypotheses
    for one sentence the first is taken, which is the best.

    Raises:
        UsageError: numbers are missing, or one occurs twice.
    """
    outputs: dict[str, dict[int, str]] = {letter: {} for letter in "STHDP"}
    previous: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not (match := GENERATED.fullmatch(line)):
            continue
        letter, sentence, text = match[1], int(match[2]), match[3]
        if sentence in outputs[letter]:
            # The other hypotheses of an n-best list follow the best one immediately.
            if letter in "ST" or previous[letter] != sentence:
                raise UsageError(f"{name}: line {number} is {letter}-{sentence} for the second time")
        else:
            outputs[letter][sentence] = text.partition("\t")[2] if letter in "HD" else text
        previous[letter] = sentence
    hypotheses = _in_order(outputs["D"] or outputs["H"], name, "D" if outputs["D"] else "H")
    references = _in_order(outputs["T"], name, "T") if outputs["T"] else None
    if references is not None and len(references) != len(hypotheses):
        raise UsageError(
            f"{name}: has {len(hypotheses)} hypotheses and {len(references)} references (lines T-)"
        )
    return Translations(name, hypotheses, references)


def _in_order(texts: dict[int, str], name: str, letter: str) -> list[str]:
    missing = next((number for number in range(len(texts)) if number not in texts), None)
    if missing is not None:
        raise UsageError(
            f"{name}: no line {letter}-{missing}, although there is {letter}-{max(texts)}; the numbers have "
            "to run from 0 without a gap (did fairseq-generate skip sentences for their length?)"
        )
    return join_pieces([texts[number] for number in range(len(texts))])


def join_pieces(texts: Sequence[str]) -> list[str]:
    """Joins the pieces of subword-nmt, and those of sentencepiece if half of the texts have its sign."""
    texts = [WORD_GOES_ON.sub("", text) for text in texts]
    if 2 * sum(WORD_BEGINS in text for text in texts) < max(1, sum(map(bool, texts))):
        return texts
    return [text.replace(" ", "").replace(WORD_BEGINS, " ").strip() for text in texts]


def check_counts(system: Translations, references: Sequence[str], name: str) -> None:
    """Raises UsageError, with the first line that has no counterpart, unless the numbers are equal."""
    ours, theirs = len(system.hypotheses), len(references)
    if ours != theirs:
        raise UsageError(
            f"{system.name} has {ours} sentences and {name} has {theirs}: "
            f"line {min(ours, theirs) + 1} of {name if theirs > ours else system.name} has no counterpart"
        )


def score(hypotheses: Sequence[str], references: Sequence[str], language: str = "fr") -> dict:
    """Returns all figures of one system as plain data, scores in percent.

    Args:
        hypotheses, references: detokenised sentences, equally many.
        language: the language whose Moses rules tokenise for the tokenised BLEU.

    Raises:
        UsageError: see ``tokenised_bleu``.
    """
    bleu, chrf = BLEU(), CHRF()
    result = bleu.corpus_score(hypotheses, [references])
    chrf_score = chrf.corpus_score(hypotheses, [references]).score
    return {
        "sentences": len(hypotheses),
        "sacrebleu": {"score": result.score, "signature": bleu.get_signature().format()},
        "chrf": {"score": chrf_score, "signature": chrf.get_signature().format()},
        "length_ratio": result.sys_len / result.ref_len if result.ref_len else 0.0,
        "hypothesis_tokens": result.sys_len,
        "reference_tokens": result.ref_len,
        "tokenised_bleu": {
            "score": tokenised_bleu(hypotheses, references, language),
            "tokenizer": f"sacremoses {version('sacremoses')}, language {language}",
            "note": TOKENISED_NOTE,
        },
    }


def tokenised_bleu(hypotheses: Sequence[str], references: Sequence[str], language: str = "fr") -> float:
    """Returns BLEU in percent as multi-bleu.perl computes it, cased and unsmoothed, on Moses-tokenised text.

    Raises:
        UsageError: Moses has no rules for the language; sacremoses would silently use those for English.
    """
    known = sorted(set(NonbreakingPrefixes().available_langs.values()))
    if language not in known:
        raise UsageError(f"no rules to tokenise language {language!r}, choose from {', '.join(known)}")
    tokenizer = MosesTokenizer(lang=language)

    def tokenise(texts):
        return [tokenizer.tokenize(text, escape=False, return_str=True) for text in texts]

    # Without force, sacreBLEU warns that the text looks tokenised, which it is meant to be here.
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    return metric.corpus_score(tokenise(hypotheses), [tokenise(references)]).score


def paired_bootstrap(
    system: Translations,
    baseline: Translations,
    references: Sequence[str],
    samples: int = 1000,
    seed: int = 12345,
) -> dict:
    """Runs sacreBLEU's paired bootstrap test of a system against a baseline; returns plain data.

    The p-value is (c + 1) / (samples + 1), where c counts the resamplings of the test set in which the size
    of the difference between the two systems exceeds its mean by more than the difference on the test set;
    below 0.05 is called significant. sacreBLEU treats a ``seed`` of 0 as none.
    """
    systems = [("baseline", baseline.hypotheses), ("system", system.hypotheses)]
    metrics = {"BLEU": BLEU(), "chrF": CHRF()}
    # sacreBLEU reads the seed from the environment alone.
    with mock.patch.dict(os.environ, SACREBLEU_SEED=str(seed)):
        signatures, scores = PairedTest(systems, metrics, [references], test_type="bs", n_samples=samples)()
    report = {"baseline": baseline.name, "samples": samples, "seed": seed}
    for key, metric in zip(("sacrebleu", "chrf"), signatures, strict=True):
        of_baseline, of_system = scores[metric]
        report[key] = {
            "baseline_score": float(of_baseline.score),
            "score": float(of_system.score),
            # sacreBLEU's formula gives the smallest p-value where every resampling has a difference of zero.
            "p_value": 1.0 if of_system.score == of_baseline.score else float(of_system.p_value),
            "signature": signatures[metric].format(),
        }
    return report


def render(report: dict) -> str:
    """Formats the report of ``rhhn score`` as text."""
    bleu, chrf, tokenised = report["sacrebleu"], report["chrf"], report["tokenised_bleu"]
    lines = [
        f"hypotheses    {report['hypotheses']}",
        f"reference     {report['reference']}",
        f"sentences     {report['sentences']}",
        f"sacreBLEU     {bleu['score']:.2f}  {bleu['signature']}",
        f"chrF          {chrf['score']:.2f}  {chrf['signature']}",
        f"length ratio  {report['length_ratio']:.3f}  "
        f"({report['hypothesis_tokens']} / {report['reference_tokens']} tokens)",
        f"tokenised     {tokenised['score']:.2f}  {tokenised['note']} ({tokenised['tokenizer']})",
    ]
    if test := report.get("paired_bootstrap"):
        how = f"{test['samples']} resamplings, seed {test['seed']}"
        lines.append(f"paired bootstrap against {test['baseline']} ({how})")
        for key, name in (("sacrebleu", "sacreBLEU"), ("chrf", "chrF")):
            ours, theirs, p = (test[key][figure] for figure in ("score", "baseline_score", "p_value"))
            lines.append(f"  {name:11} {ours:.2f} against {theirs:.2f}: p = {p:.4f}")
    return "\n".join(lines)
