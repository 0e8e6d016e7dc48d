"""Benchmarks of speed and memory, run from a checkout: ``python -m benchmarks.cells``.

- ``cells``: forward and backward of every cell on every backend, beside ``torch.nn.LSTM``
- ``lm``: training steps of character language models, beside the same models with ``torch.nn.LSTM``
- ``translation``: training passes or beam search of translation models, beside fairseq's ``lstm``
- ``memory``: peak memory of a cell's forward and backward by backend
- ``profile``: where the time of an update of ``fairseq-train`` goes

Each but the last has ``Config`` (a dataclass of what is measured), ``SMOKE`` (sizes that run everything
within seconds), ``COLUMNS`` (its table) and ``run(config)``, which returns a report. They share ``machine``
(device, threads, forced backends), ``contenders`` (the layers), ``parity`` (results against float64, before
anything is timed), ``timing`` (rounds in which every contender runs once), ``floors`` (operations, and the
least time that these take) and ``report`` (command line, tables, JSON).
"""
