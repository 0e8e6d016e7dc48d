"""Operations on tensors and numbers: what runs a cell over a sequence, fast, and the choice of how.

Nothing here knows a cell or a configuration. A cell hands its own parameters to its operation (``lstm``,
``hyper_lstm``, ``highway``) or lets ``loop`` call its step; ``backends`` has the one table that chooses.
"""
