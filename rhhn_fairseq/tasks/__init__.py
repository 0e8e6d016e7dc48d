"""fairseq tasks: dictionaries, datasets, iterators and the state that is carried between batches."""

# Imported first, because it loads the plugin, which imports the modules here in its own order.
import fairseq  # noqa: F401
