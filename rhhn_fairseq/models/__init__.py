"""fairseq models: embedding, stack of recurrent layers, output layer."""

# Imported first, because it loads the plugin, which imports the modules here in its own order.
import fairseq  # noqa: F401
