"""Drawing text from a model, with its prompt."""

from itertools import islice

from helpers.tiny_char_lm import TRAIN, build_model, build_task, write_corpus
from helpers.tiny_handwriting import disturb

from rhhn_fairseq.generate import characters as sampling


def test_drawing_is_evaluation_and_reads_the_whole_prompt(tmp_path, monkeypatch):
    task = build_task(write_corpus(tmp_path))
    model = disturb(build_model(task, output_dropout=0.5))
    prompt, likeliest = task.encode_prompt(TRAIN[:40]), sampling.SamplingConfig(temperature=0.0)

    def first_symbols():
        return list(islice(sampling.generate(model, prompt, likeliest), 20))

    model.eval()
    expected = first_symbols()
    model.train()
    assert first_symbols() == expected
    # In several pieces, as a prompt of more than 512 symbols.
    monkeypatch.setattr(sampling, "PROMPT_CHUNK", 7)
    assert first_symbols() == expected
