"""Recurrent networks whose weights change as they read, as a fairseq plugin and a plain PyTorch library.

Importing this package never imports fairseq. Where fairseq is loaded, before or after, the plugin
is loaded too (`rhhn_fairseq.autoload`), so `--user-dir` finds everything registered.
"""

from rhhn_fairseq.autoload import load_plugin_with_fairseq

load_plugin_with_fairseq()
