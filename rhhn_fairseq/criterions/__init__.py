"""fairseq criterions: losses and the numbers people read."""
