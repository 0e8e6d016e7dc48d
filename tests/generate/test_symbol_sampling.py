"""Drawing symbols: the frequencies are those of the model, changed by temperature and top-k as asked."""

from itertools import islice

import pytest
import torch
from helpers.tiny_char_lm import TRAIN, build_model, build_task, write_corpus
from helpers.tiny_handwriting import disturb

from rhhn_fairseq.data.text.vocabulary import EOS
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.generate import characters
from rhhn_fairseq.generate.characters import SamplingConfig, draw
from rhhn_fairseq.nn import CharacterNetwork, packaged

ROWS = 20_000
LOGITS = torch.tensor([1.0, float("-inf"), 0.0, 2.0, -1.0])

# Five standard deviations of a frequency that is one half.
NOISE = 5 * 0.5 / ROWS**0.5


def drawn(seed=1, **options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return draw(LOGITS.expand(ROWS, -1), SamplingConfig(**options), generator)


def frequencies(draws) -> torch.Tensor:
    return torch.bincount(draws, minlength=len(LOGITS)) / ROWS


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_logits_over_the_temperature(temperature):
    expected = (LOGITS / temperature).softmax(0)
    shares = frequencies(drawn(temperature=temperature))
    torch.testing.assert_close(shares, expected, rtol=0, atol=NOISE)
    assert shares[1] == 0


def test_top_k_draws_from_the_likeliest():
    shares = frequencies(drawn(top_k=2))
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0])
    expected[[3, 0]] = torch.tensor([2.0, 1.0]).softmax(0)
    torch.testing.assert_close(shares, expected, rtol=0, atol=NOISE)
    assert torch.equal(drawn(top_k=9), drawn(top_k=0))


@pytest.mark.parametrize(
    "top_p, kept", [(0.0, [3]), (0.5, [3]), (0.7, [3, 0]), (0.95, [3, 0, 2]), (1.0, [3, 0, 2, 4])]
)
def test_top_p_draws_from_the_fewest_that_have_it_together(top_p, kept):
    shares, expected = frequencies(drawn(top_p=top_p)), torch.zeros(5)
    # Of the probabilities 0.24, 0, 0.09, 0.64 and 0.03.
    expected[kept] = LOGITS[kept].softmax(0)
    torch.testing.assert_close(shares, expected, rtol=0, atol=NOISE)


def test_the_seed_decides():
    assert torch.equal(drawn(seed=3), drawn(seed=3))
    assert not torch.equal(drawn(seed=3), drawn(seed=4))


def test_temperature_zero_takes_the_likeliest_and_a_small_one_does_not_overflow():
    assert (drawn(temperature=0.0) == 3).all() and (drawn(temperature=1e-30) == 3).all()


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"temperature": float("inf")}, {"top_k": -1}, {"top_p": 1.1}, {"seed": 2**64}],
)
def test_what_cannot_be_drawn_is_refused(options):
    with pytest.raises(UsageError, match=next(iter(options)).replace("_", "-")):
        SamplingConfig(**options)


def test_drawing_is_evaluation_and_reads_the_whole_prompt(tmp_path, monkeypatch):
    task = build_task(write_corpus(tmp_path))
    model = disturb(build_model(task, output_dropout=0.5))
    prompt, likeliest = task.encode_prompt(TRAIN[:40]), characters.SamplingConfig(temperature=0.0)

    def first_symbols():
        return list(islice(characters.generate(model, prompt, likeliest), 20))

    model.eval()
    expected = first_symbols()
    model.train()
    assert first_symbols() == expected
    # In several pieces, as a prompt of more than 512 symbols.
    monkeypatch.setattr(characters, "PROMPT_CHUNK", 7)
    assert first_symbols() == expected


def test_a_text_is_the_prompt_and_what_the_model_finds_likeliest_after_it(tmp_path):
    network = CharacterNetwork.from_pretrained(packaged("characters"))
    text = characters.sample(network, "import ", 25, SamplingConfig(temperature=0.0))
    assert text.startswith("import ") and len(text) == 32
    # The first input of a text is the end of the line before it.
    tokens = torch.tensor([[EOS, *network.vocabulary.encode(text)]])
    logits, _ = network(tokens)
    assert torch.equal(logits[0, 7:-1].argmax(-1), tokens[0, 8:])
    other = characters.sample(network, "import ", 25, SamplingConfig(seed=2))
    assert other == characters.sample(network, "import ", 25, SamplingConfig(seed=2)) != text


def test_a_network_reads_texts_in_parts_and_of_several_lengths():
    network = CharacterNetwork.from_pretrained(packaged("characters")).double()
    tokens = torch.from_numpy(network.vocabulary.encode("def read(self):\nfor name in names:")).view(2, -1)
    whole, after = network(tokens)
    first, extra = network(tokens[:, :7])
    second, last = network(tokens[:, 7:], state=extra["state"])
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=0, atol=1e-12)
    mask = torch.arange(tokens.shape[1]) < torch.tensor([[7], [tokens.shape[1]]])
    _, short = network(tokens, mask)
    for got, row, other in zip(short["state"], extra["state"], after["state"], strict=True):
        torch.testing.assert_close(got, torch.stack([row[0], other[1]]), rtol=0, atol=1e-12)
    assert len(last["state"]) == len(after["state"])
