"""Problems that need a long memory: what their examples are and where they come from.

Nothing here imports fairseq or torch.
"""
