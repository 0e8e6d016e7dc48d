"""What options of a search promise, by calculation, on a GNMT with random weights.

``docs/options.md`` says of every option that works which test sees its effect.
"""

import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import options as fairseq_options
from fairseq.data import Dictionary
from omegaconf import OmegaConf

import rhhn_fairseq.plugin  # noqa: F401  (adapts the searches)
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.gnmt import GNMT, GNMTConfig
from rhhn_fairseq.tasks.gnmt_translation import GNMTTranslationConfig, GNMTTranslationTask

ROOT = Path(__file__).resolve().parents[2]
SENTENCES, LONGEST = 24, 12
WORDS = Dictionary()
for word in "abcdefgh":
    WORDS.add_symbol(word)
PAD, EOS, UNK = WORDS.pad(), WORDS.eos(), WORDS.unk()


def random_model():
    """A model whose translations end, and repeat themselves, at different lengths."""
    torch.manual_seed(3)
    sizes = dict(hidden_size=8, embed_dim=8, encoder_layers=2, decoder_layers=2, residual_from=0)
    config = OmegaConf.structured(GNMTConfig(cell="lstm", init_range=1.0, dropout=0.3, **sizes))
    return GNMT.for_vocabulary(OmegaConf.to_object(config), len(WORDS)).eval()


@pytest.fixture(scope="module")
def model():
    return random_model()


def sample():
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 7, (SENTENCES,), generator=draw).sort(descending=True).values
    source = torch.full((SENTENCES, int(lengths[0]) + 1), PAD)
    for row, length in zip(source, lengths, strict=True):
        row[-1 - length : -1] = torch.randint(UNK + 1, len(WORDS), (int(length),), generator=draw)
        row[-1] = EOS
    inputs = {"src_tokens": source, "src_lengths": lengths + 1}
    # As in any batch but the first, the numbers are not those of the rows.
    return {"net_input": inputs, "id": torch.arange(SENTENCES) + 100}


def search(model, constraints=None, prefix=None, config=(), batch=None, **options):
    """The hypotheses of every sentence, each a list of pieces and the score, the best first."""
    task = GNMTTranslationTask(GNMTTranslationConfig(data="", **dict(config)), WORDS, WORDS)
    args = Namespace(**{"beam": 4, "max_len_a": 0, "max_len_b": LONGEST, **options})
    torch.manual_seed(1)
    generator = task.build_generator([model], args)
    found = generator.generate([model], batch or sample(), prefix_tokens=prefix, constraints=constraints)
    return [[(one["tokens"].tolist(), float(one["score"]), one) for one in row] for row in found]


def log_p(model, sentence: int, tokens) -> torch.Tensor:
    """The model's log-probability of every piece, with the right pieces before it."""
    source = sample()["net_input"]["src_tokens"][sentence : sentence + 1]
    before = torch.tensor([[EOS, *tokens[:-1]]])
    logits, _ = model(source, (source != PAD).sum(1), before)
    return logits.log_softmax(-1)[0].gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).detach()


def hypotheses(found):
    return [(row, tokens, score) for row, all_ in enumerate(found) for tokens, score, _ in all_]


def ends_once(found) -> bool:
    return all(tokens.index(EOS) == len(tokens) - 1 for _, tokens, _ in hypotheses(found))


def repeats(tokens, n) -> bool:
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) < len(grams)


@pytest.mark.parametrize(
    "options, divisor",
    [
        ({}, lambda n: n),
        ({"lenpen": 0.6}, lambda n: n**0.6),
        ({"unnormalized": True}, lambda n: 1),
        ({"match_source_len": True}, lambda n: n),
        ({"config": {"length_penalty": "gnmt:0.5"}}, lambda n: ((5 + n) / 6) ** 0.5),
    ],
)
def test_scores_are_the_models(model, options, divisor):
    found = search(model, **options)
    assert ends_once(found) and all(len(row) for row in found)
    for row, tokens, score in hypotheses(found):
        if len(tokens) <= LONGEST:
            expected = float(log_p(model, row, tokens).sum()) / divisor(len(tokens))
            assert score == pytest.approx(expected, abs=1e-4)
    assert all(row == sorted(row, key=lambda one: -one[1]) for row in found)


def test_wider_beams_give_more_and_better_hypotheses(model):
    narrow, wide = search(model, beam=1, unnormalized=True), search(model, beam=6, unnormalized=True)
    assert {len(row) for row in narrow} == {1} and {len(row) for row in wide} == {6}
    assert sum(b[0][1] for b in wide) > sum(a[0][1] for a in narrow)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"diverse_beam_groups": 2}])
def test_no_ngram_is_repeated(model, size, more):
    assert sum(repeats(tokens, size) for _, tokens, _ in hypotheses(search(model, **more))) > 10
    found = search(model, no_repeat_ngram_size=size, **more)
    assert all(found) and not any(repeats(tokens, size) for _, tokens, _ in hypotheses(found))


@pytest.mark.parametrize("groups", [2, 4])
def test_every_group_finishes_its_share_and_nothing_goes_on_behind_the_end(model, groups):
    options = {"diverse_beam_groups": groups, "diverse_beam_strength": 0.0, "unnormalized": True}
    found = search(model, **options)
    assert ends_once(found) and {len(row) for row in found} == {4}
    # Without a penalty, every group finds what a beam of its own width finds.
    alone = search(model, beam=4 // groups, unnormalized=True)
    for row, one in zip(found, alone, strict=True):
        expected = sorted([tokens for tokens, _, _ in one] * groups)
        assert sorted(tokens for tokens, _, _ in row) == expected
    apart = search(model, **options | {"diverse_beam_strength": 5.0})
    assert ends_once(apart) and {len(row) for row in apart} == {4}
    assert all(len({tokens[0] for tokens, _, _ in row}) >= groups for row in apart)


def test_outputs_as_long_as_the_source(model):
    lengths = sample()["net_input"]["src_lengths"].tolist()
    assert all(
        len(tokens) == lengths[row] for row, tokens, _ in hypotheses(search(model, match_source_len=True))
    )


def test_bounds_of_the_length(model):
    assert all(4 <= len(t) - 1 <= 5 for _, t, _ in hypotheses(search(model, min_len=4, max_len_b=5)))
    bounds = (2 * sample()["net_input"]["src_lengths"] + 1).clamp(min=8).tolist()
    found = hypotheses(search(model, max_len_a=2, max_len_b=1, min_len=8))
    assert min(len(tokens) - 1 for _, tokens, _ in found) == 8
    assert all(len(tokens) - 1 <= bounds[row] for row, tokens, _ in found)
    assert {0, 10} < {row for row, tokens, _ in found if len(tokens) - 1 == bounds[row]}


@pytest.mark.parametrize(
    "options", [{}, {"diverse_beam_groups": 2}, {"config": {"beam_size_threshold": 2.0}}]
)
def test_bounds_of_the_length_are_those_of_a_sentence_alone(model, options):
    options = options | {"max_len_a": 0.7, "max_len_b": 1}
    together = search(model, **options)
    for row, inputs in enumerate(zip(*sample()["net_input"].values(), strict=True)):
        tokens, length = inputs
        net_input = {"src_tokens": tokens[None, len(tokens) - length :], "src_lengths": length[None]}
        (alone,) = search(model, batch={"net_input": net_input, "id": torch.tensor([row])}, **options)
        assert [tokens for tokens, _, _ in together[row]] == [tokens for tokens, _, _ in alone]
        scores = [score for _, score, _ in alone]
        assert [score for _, score, _ in together[row]] == pytest.approx(scores, abs=1e-5)
        assert all(len(tokens) - 1 <= int(0.7 * length + 1) for tokens, _, _ in alone)


def test_an_empty_prefix_gives_the_empty_translation(model):
    """As --prefix-size gives it for an empty line of the reference, whatever else is in the batch."""
    prefix = torch.full((SENTENCES, 2), WORDS.index("c"))
    prefix[3] = torch.tensor([EOS, PAD])
    found = search(model, prefix=prefix)
    assert [tokens for tokens, _, _ in found[3]] == [[EOS]]
    assert all(tokens[:2] == prefix[0].tolist() for row, tokens, _ in hypotheses(found) if row != 3)


def test_the_unknown_piece_costs_its_penalty(model):
    count = {
        penalty: sum(t.count(UNK) for _, t, _ in hypotheses(search(model, unkpen=penalty)))
        for penalty in (-3, 0, 50)
    }
    assert count[-3] > count[0] > count[50] == 0


def test_temperature_divides_the_logits(model):
    row, tokens, score = hypotheses(search(model, temperature=3.0, unnormalized=True))[7]
    source = sample()["net_input"]["src_tokens"][row : row + 1]
    logits, _ = model(source, (source != PAD).sum(1), torch.tensor([[EOS, *tokens[:-1]]]))
    found = (logits / 3.0).log_softmax(-1)[0].gather(1, torch.tensor(tokens).unsqueeze(1)).sum()
    assert score == pytest.approx(float(found), abs=1e-4)


def test_a_prefix_is_written_even_if_it_repeats_itself(model):
    prefix = torch.full((SENTENCES, 3), WORDS.index("c"))
    for options in ({}, {"no_repeat_ngram_size": 2}):
        found = search(model, prefix=prefix, **options)
        assert all(tokens[:3] == prefix[0].tolist() for _, tokens, _ in hypotheses(found))


@pytest.mark.parametrize("options", [{"sampling_topk": 2}, {"sampling_topp": 0.4}, {}])
def test_samples_come_from_the_likeliest(model, options):
    found = search(model, sampling=True, unnormalized=True, **options)
    assert found[0][0][0] != search(model)[0][0][0] or found[1][0][0] != search(model)[1][0][0]
    outside = 0
    for row, tokens, _ in hypotheses(found):
        source = sample()["net_input"]["src_tokens"][row : row + 1]
        logits, _ = model(source, (source != PAD).sum(1), torch.tensor([[EOS, *tokens[:-1]]]))
        p = logits.detach().softmax(-1)[0]
        p[:, PAD] = 0
        p[0, EOS] = 0
        for step, token in enumerate(tokens[:LONGEST]):
            above = p[step] > p[step, token] + 1e-6
            if "sampling_topk" in options:
                outside += int(above.sum()) >= 2
            else:
                outside += float(p[step][above].sum()) > options.get("sampling_topp", 1.0)
    assert outside == 0


def test_the_diversity_rate_costs_siblings(model):
    """Li et al. 2016, arXiv 1611.08562: a hypothesis loses the rate times its rank among its siblings."""
    plain, apart = (search(model, unnormalized=True, **o) for o in ({}, {"diversity_rate": 2.0}))
    share = [sum(len({t[0] for t, _, _ in row}) for row in found) for found in (plain, apart)]
    assert share[1] > share[0]


def test_coverage_is_added(model):
    for row, all_ in enumerate(search(model, config={"length_penalty": "none", "coverage_penalty": 0.3})):
        real = sample()["net_input"]["src_tokens"][row] != PAD
        for tokens, score, one in all_:
            if len(tokens) <= LONGEST:
                coverage = one["attention"][real].sum(1).clamp(max=1).log().sum()
                expected = float(log_p(model, row, tokens).sum() + 0.3 * coverage)
                assert score == pytest.approx(expected, abs=1e-3)


def retaining(modules=None):
    network = random_model()
    chosen = OmegaConf.create({"retain_dropout": True, "retain_dropout_modules": modules, "beam": 4})
    network.prepare_for_inference_(OmegaConf.create({"generation": chosen}))
    return network


def test_dropout_is_retained_where_it_is_wanted(model):
    before = [tokens for _, tokens, _ in hypotheses(search(model))]
    for modules in (None, "['GNMTEncoder']", ["GNMTDecoder"]):
        network = retaining(modules)
        after = [tokens for _, tokens, _ in hypotheses(search(network))]
        assert sum(a != b for a, b in zip(before, after, strict=False)) > 20
        active = {name.split(".")[0] for name, part in network.named_modules() if part.training}
        wanted = {"encoder", "decoder"} if modules is None else {str(modules)[6:13].lower()}
        assert active == wanted
    with pytest.raises(UsageError, match="--retain-dropout-modules Encoder: .* choose from .*GNMTEncoder"):
        retaining("['Encoder']")


@pytest.mark.parametrize("metric, highest", [("bleu", True), ("accuracy", True), ("loss", False)])
def test_the_direction_follows_the_metric(metric, highest):
    line = ["data", "--arch", "lstm_gnmt_small", "--best-checkpoint-metric", metric]
    line += ["--eval-bleu", "--report-accuracy"]
    args = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), line)
    assert args.maximize_best_checkpoint_metric is highest


def test_every_option_of_the_page_names_a_test():
    rows = re.findall(r"^\| (`--.*) \| .* \| `(\S+)` \|$", (ROOT / "docs" / "options.md").read_text(), re.M)
    assert len(rows) > 20
    for _, place in rows:
        path, _, name = place.partition("::")
        assert re.search(rf"^ *def {name}\(", (ROOT / path).read_text(), re.M), place
