"""What trainings and trained networks did, as tables and pictures. Nothing here needs fairseq."""
