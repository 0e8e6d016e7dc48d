"""Operations on tensors and numbers: fast ways to run a cell over a sequence, and the choice between them.

Nothing here depends on a cell or a configuration. A cell passes its parameters to its operation (``lstm``,
``hyper_lstm``, ``highway``) or lets ``loop`` call its step; the table in ``backends`` decides which.
"""
