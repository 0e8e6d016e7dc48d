"""Parallel corpora: from raw text in two languages to the directory that translation is trained on.

Nothing here imports fairseq or torch; fairseq-preprocess runs as a separate process.
"""
