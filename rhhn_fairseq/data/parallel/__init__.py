"""Parallel corpora: from raw text in two languages to the directory that translation is trained on.

Preparing imports neither fairseq nor torch.

"""
