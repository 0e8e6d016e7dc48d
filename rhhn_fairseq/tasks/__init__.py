"""fairseq tasks: dictionaries, datasets, iterators and the state that is carried between batches."""
