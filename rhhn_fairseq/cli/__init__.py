"""The commands of ``rhhn``, which ``table`` lists.

A command is a module with ``main(argv)``. It imports slow modules, such as torch and fairseq, within its
functions, so that --help and a mistyped option are answered at once.
"""
