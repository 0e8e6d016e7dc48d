"""Fixes for fairseq's scorer; ``tasks/searches.py`` replaces its searches."""

from rhhn_fairseq.compat import in_place_of


def leave_out_symbols_without_a_score() -> bool:
    """``fairseq-eval-lm --output-word-probs`` and ``--output-word-stats`` need a score for every symbol.

    A character model gives the unknown symbol no probability. fairseq's program then drops the score and
    keeps the symbol. Here the scorer leaves out both.
    """
    from fairseq.sequence_scorer import SequenceScorer

    @in_place_of(SequenceScorer, "generate")
    def generate(inner, self, models, sample, **kwargs):
        results = inner(self, models, sample, **kwargs)
        if "tally" in sample:
            for hypothesis in (hypothesis for hypotheses in results for hypothesis in hypotheses):
                scored = hypothesis["positional_scores"].isfinite()
                for name in ("tokens", "positional_scores"):
                    hypothesis[name] = hypothesis[name][scored]
        return results

    return True
