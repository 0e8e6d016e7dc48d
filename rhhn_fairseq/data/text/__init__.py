"""Character corpora: from text to fairseq's binary format and back. Nothing here needs fairseq."""
