"""Scores translations: sacreBLEU and chrF with signatures, length ratio, tokenised BLEU, significance.

Usage: %(prog)s HYPOTHESES --reference data-bin/multi30k-en-fr/raw/test.fr

HYPOTHESES is a text file, one sentence per line, or the output of fairseq-generate. Without --reference the
references are fairseq-generate's own T- lines. These have passed through the dictionary and may differ from
the text, so give --reference for figures that are to be compared with others.
"""

import json

from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError

# More resamplings change no figure, and do not fit in memory.
MOST_SAMPLES = 1_000_000


def main(argv=None) -> None:
    parser = make_parser("score", __doc__)
    parser.add_argument("hypotheses", help="translations, one per line, or the output of fairseq-generate")
    parser.add_argument("--reference", metavar="FILE", help="raw reference text, one sentence per line")
    parser.add_argument("--baseline", metavar="FILE", help="a second system, for a paired bootstrap test")
    parser.add_argument(
        "--samples", type=int, default=1000, help="resamplings of the test set (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=12345, help="seed of the resampling (default: %(default)s)"
    )
    parser.add_argument(
        "--language", default="fr", help="language of the tokeniser for tokenised BLEU (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    args = parser.parse_args(argv)
    if not 1 <= args.samples <= MOST_SAMPLES:
        raise UsageError(f"--samples {args.samples} is not possible, choose from 1 to {MOST_SAMPLES:,}")
    if args.baseline is None and any(vars(args)[n] != parser.get_default(n) for n in ("samples", "seed")):
        raise UsageError("--samples and --seed have no effect without --baseline")
    if args.seed < 1:
        raise UsageError(f"--seed {args.seed} is too small, the smallest is 1")

    from rhhn_fairseq.files import check_output, read_lines, replace_file
    from rhhn_fairseq.generate import scoring

    check_output("--json", args.json, (args.hypotheses, args.reference, args.baseline))
    system = scoring.read_translations(args.hypotheses)
    if args.reference is not None:
        references, name = read_lines(args.reference), args.reference
    elif system.references is not None:
        references = system.references
        unknown = sum(scoring.UNKNOWN in reference for reference in references)
        name = f"the T- lines of {args.hypotheses}, which have been through the dictionary"
        if unknown:
            name += f": {unknown} of {len(references)} hold unknown pieces, --reference names the raw text"
    else:
        raise UsageError(f"{args.hypotheses} holds no references (T- lines): name them with --reference FILE")
    scoring.check_counts(system, references, name)

    report = {"hypotheses": args.hypotheses, "reference": name}
    report |= scoring.score(system.hypotheses, references, args.language)
    if args.baseline is not None:
        baseline = scoring.read_translations(args.baseline)
        scoring.check_counts(baseline, references, name)
        report["paired_bootstrap"] = scoring.paired_bootstrap(
            system, baseline, references, args.samples, args.seed
        )
    print(scoring.render(report))
    if args.json is not None:
        with replace_file(args.json) as file:
            file.write((json.dumps(report, indent=2) + "\n").encode())
