"""The networks behind the models, in plain PyTorch, and their files. Nothing here needs fairseq."""
