"""Corpora of every kind, and what preparing them has in common. Nothing here needs fairseq."""
