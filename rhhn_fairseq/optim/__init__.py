"""Optimizers that fairseq knows by name."""
