"""fairseq models: embedding, stack of recurrent layers, output layer."""

# First, as it brings the plugin with it, which imports the modules here in an order of its own.
import fairseq  # noqa: F401
