"""Recurrent networks whose weights change as they read, as a fairseq plugin and a plain PyTorch library."""
