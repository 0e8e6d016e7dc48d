"""Tables and pictures of training runs and trained networks. Nothing here needs fairseq."""
