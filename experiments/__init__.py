"""Experiments, run from a checkout: ``python -m experiments.reproduce`` and ``python -m experiments.tune``.

``records`` holds what they have measured, as JSON, and ``notes`` how they were measured, at length.
"""

import logging

# One of fairseq's models configures the root logger at level DEBUG when it is imported; the first one wins.
logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
