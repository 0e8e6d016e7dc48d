"""fairseq tasks: dictionaries, datasets, iterators and the state that is carried between batches."""

# First, as it brings the plugin with it, which imports the modules here in an order of its own.
import fairseq  # noqa: F401
