"""Experiments, run from a checkout: ``python -m experiments.reproduce`` and ``python -m experiments.tune``.

``records`` holds what they have measured, as JSON, and ``notes`` how they were measured, at length.
"""
