"""fairseq models: embedding, stack of recurrent layers, output layer."""
