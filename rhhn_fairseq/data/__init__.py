"""Corpora of every kind, and the code that preparing them shares. Nothing here needs fairseq."""
