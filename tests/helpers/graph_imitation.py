"""CUDA graphs as the CPU can have them: a recording runs the body again on its inputs, into its outputs.

It has the same aliasing, which is what can go wrong.
"""

from rhhn_fairseq.ops.backends import graphs


def imitate(call, values, beside=None):
    """A recording without CUDA."""
    inputs = [value.clone() for value in values]
    outputs = tuple(call(inputs))

    def replay():
        for output, new in zip(outputs, call(inputs), strict=True):
            output.copy_(new)

    return graphs.Recording(inputs, outputs, replay, settle=lambda: None)


def count(recordings) -> int:
    """How many there are."""
    return len(recordings.kept)


def imitated_graphs(monkeypatch) -> graphs.Recordings:
    """Has graphs be imitated on the CPU where they are wanted; the recordings."""
    kept = graphs.Recordings(imitate)
    monkeypatch.setattr(graphs, "_recordings", kept)
    monkeypatch.setattr(graphs, "record", imitate)
    monkeypatch.setattr(graphs, "applies", lambda device: True)
    monkeypatch.setattr(graphs, "place", lambda values: "cpu")
    return kept
