"""Baselines for the networks: n-grams and Hopfield's memory."""
