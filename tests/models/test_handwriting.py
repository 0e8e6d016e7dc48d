"""The handwriting model, its window, data sets and task, and their training through fairseq's programs."""

import numpy as np
import pytest
import torch
from fairseq.data import data_utils
from helpers.cli import USER_DIR, fairseq_train, json_log, run_module
from helpers.in_process import Optimizer
from helpers.strokes_cli import random_rows
from helpers.tiny_handwriting import NORMALISATION, SYMBOLS, build, prepare_words
from omegaconf import OmegaConf

from rhhn_fairseq.cells import build_cell, cell_options
from rhhn_fairseq.criterions.mixture_density import MixtureDensity
from rhhn_fairseq.data.strokes.normalisation import Normalisation
from rhhn_fairseq.data.strokes.points import Line, from_offsets
from rhhn_fairseq.data.strokes.store import StrokeSplit, write_split
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.window import UNKNOWN, Window, WindowCell, WindowConfig, WindowStack, one_hot
from rhhn_fairseq.models.handwriting import Handwriting, HandwritingConfig
from rhhn_fairseq.tasks.handwriting import HandwritingTask, HandwritingTaskConfig, StrokeDataset

T, B, C, H, U, V, K = 6, 3, 3, 5, 4, 7, 2


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return prepare_words(tmp_path_factory.mktemp("words") / "data")


def _random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _window_stack(cell="lstm", layers=1, **options):
    torch.manual_seed(0)
    small = {"hyper_size": 3} if "hyper_size" in cell_options(cell) else {}
    small |= {"rhn_depth": 2} if "rhn_depth" in cell_options(cell) else {}
    config = WindowConfig(
        cell=cell,
        input_size=C,
        hidden_size=H,
        layers=layers,
        symbols=V,
        window=K,
        points_per_symbol=1.5,
        cell_options=small | options,
    )
    stack = WindowStack(config).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return stack


def _text():
    """Indices of texts of 4, 2 and 3 characters, one of them unknown."""
    text = torch.tensor([[0, 3, 6, 1], [2, 5, UNKNOWN, UNKNOWN], [4, UNKNOWN, 2, UNKNOWN]])
    return one_hot(text, V, torch.float64)


def test_window_equals_the_equations():
    """Graves 2013, equations 46 to 51, position by position in numpy, with an LSTM's own steps."""
    stack, text, x = _window_stack(), _text(), _random(T, B, C)
    y, _, phi = stack.eval()(x, text)
    cell, window = stack.first.cell, stack.first.window
    weight, bias = (part.detach().numpy() for part in (window.weight, window.bias))
    for b in range(B):
        w, kappa = np.zeros(V), np.zeros(K)
        state = cell.zero_state(1, dtype=torch.float64)
        for t in range(T):
            inputs = np.concatenate([x[t, b].numpy(), w])
            y_1, state = cell(torch.from_numpy(inputs).view(1, 1, -1), state)
            h = y_1[0, 0].detach().numpy()
            np.testing.assert_allclose(y[t, b].detach().numpy(), h, rtol=0, atol=1e-12)
            a, beta, step = np.exp(h @ weight + bias).reshape(3, K)
            kappa = kappa + step
            w = np.zeros(V)
            for u in range(1, U + 2):
                value = sum(a[k] * np.exp(-beta[k] * (kappa[k] - u) ** 2) for k in range(K))
                assert phi[t, b, u - 1].item() == pytest.approx(value, rel=1e-10)
                if u <= U:
                    w = w + value * text[b, u - 1].numpy()


def test_the_layers_above_read_the_window_of_their_own_step():
    stack, text, x = _window_stack(layers=2), _text(), _random(T, B, C)
    y, state, phi = stack.eval()(x, text)
    below, trace, _ = stack.first(x, text)
    window = torch.einsum("tbu,buv->tbv", phi[..., :U], text)
    torch.testing.assert_close(trace.window_TBV, window)
    expected, _ = stack.upper.cells[0](torch.cat([below, window], dim=-1))
    torch.testing.assert_close(y, expected)
    assert [part.shape[1] for part in state] == list(stack.state_sizes)


@pytest.mark.parametrize("cell", ["lstm", "hyperrhn", "ln_hyperlstm"])
def test_a_window_goes_on_where_it_was(cell):
    stack, text, x = _window_stack(cell, layers=2).eval(), _text(), _random(T, B, C)
    whole, final, _ = stack(x, text)
    first, state, _ = stack(x[:2], text)
    outputs = [first]
    for t in range(2, T):
        y, state, _ = stack(x[t : t + 1], text, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs), whole, rtol=0, atol=1e-12)
    for one, other in zip(state, final, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", ["ln_hyperlstm", "gru"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_window(cell, side):
    stack, text, x = _window_stack(cell).eval(), _text(), _random(T, B, C)
    lengths = (6, 3, 4)
    mask = torch.stack([torch.arange(T) < length for length in lengths], dim=1)
    mask = mask if side == "right" else mask.flip(0)
    padded = torch.full_like(x, float("nan"))
    for b, length in enumerate(lengths):
        padded[mask[:, b], b] = x[:length, b]
    padded.requires_grad_()
    y, state, _ = stack(padded, text, mask_TB=mask)
    for b, length in enumerate(lengths):
        alone, end, _ = stack(x[:length, b : b + 1], text[b : b + 1])
        torch.testing.assert_close(y[mask[:, b], b], alone[:, 0], rtol=0, atol=1e-12)
        for part, expected in zip(state, end, strict=True):
            torch.testing.assert_close(part[b], expected[0], rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(y.square().sum(), padded)
    assert (gradient[~mask] == 0).all()


def test_gradients_through_the_window():
    stack, text = _window_stack().eval(), _text()
    x = _random(3, B, C).requires_grad_()
    parameters = tuple(stack.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: stack(x, text)[0], (x, *parameters))


def test_the_window_keeps_its_place_in_half_precision():
    config = WindowConfig(cell="lstm", input_size=C, hidden_size=H, symbols=V, window=K)
    cell = WindowCell(build_cell("lstm", C + V, H), Window(config), config).bfloat16().eval()
    _, _, state = cell(
        torch.zeros(500, 1, C, dtype=torch.bfloat16), torch.zeros(1, U, V, dtype=torch.bfloat16)
    )
    assert state[-1].dtype == torch.float32
    # In bfloat16 steps of 0.04 would be lost from 16 on.
    assert state[-1].min() > 17


def test_refused_windows():
    with pytest.raises(
        UsageError, match="--window 2 reads the text of each line, and the training lines have none"
    ):
        Handwriting(HandwritingConfig(window=2), NORMALISATION, "", 0.0)
    with pytest.raises(UsageError, match="needs the text of every line"):
        build(window=2)(torch.zeros(1, 2, 3))


@pytest.mark.parametrize("window", [0, 2])
def test_batched_lines_are_the_lines_alone(window):
    model = build("ln_hyperlstm", window, layers=2).double()
    points, mask = _random(B, T, 3), torch.arange(T) < torch.tensor([[6], [2], [5]])
    text = torch.tensor([[0, 1, 2], [3, UNKNOWN, UNKNOWN], [4, 5, UNKNOWN]])
    raw, extra = model(points.masked_fill(~mask.unsqueeze(-1), float("nan")), mask, text)
    assert ("phi" in extra) == bool(window)
    for b, length in enumerate((6, 2, 5)):
        heard = text[b : b + 1, : (text[b] != UNKNOWN).sum()]
        alone, _ = model(points[b : b + 1, :length], None, heard)
        torch.testing.assert_close(raw[b, :length], alone[0], rtol=0, atol=1e-12)


def test_checkpoints_of_other_data_are_refused():
    model = build(window=2)
    state = model.state_dict()
    assert model.symbols == SYMBOLS and model.normalisation == NORMALISATION
    build(window=2, seed=1).load_state_dict(state)
    other = Handwriting(HandwritingConfig(hidden_size=8, mixtures=2, window=2), NORMALISATION, "xyz", 6.0)
    with pytest.raises(UsageError, match="the checkpoint reads other characters"):
        other.load_state_dict(state)
    moved = Normalisation((0.0, 0.0), NORMALISATION.std)
    other = Handwriting(HandwritingConfig(hidden_size=8, mixtures=2, window=2), moved, SYMBOLS, 6.0)
    with pytest.raises(
        UsageError, match=r"trained on offsets of mean \(2.5, -0.5\) .* prepare them with --stat"
    ):
        other.load_state_dict(state)


def test_statistics_survive_half_precision():
    model = build().half()
    assert model.normalisation == NORMALISATION


def _dataset(folder, lengths=(5, 9, 3, 7), texts=("ab", "", "b?", "a"), **options):
    lines = [
        Line(f"n{n}", from_offsets(random_rows(n - 1), "a"), text)
        for n, text in zip(lengths, texts, strict=True)
    ]
    write_split(folder, "train", lines)
    return lines, StrokeDataset(StrokeSplit(folder, "train"), NORMALISATION, "ab", **options)


def test_batches(tmp_path):
    lines, dataset = _dataset(tmp_path)
    assert dataset.sizes.tolist() == [4, 8, 2, 6]
    assert dataset.ordered_indices().tolist() == [2, 0, 3, 1]
    batch = dataset.collater([dataset[0], dataset[2]])
    assert (batch["ntokens"], batch["nsentences"], batch["id"].tolist()) == (6, 2, [0, 2])
    points, mask, target = batch["net_input"]["points"], batch["net_input"]["mask"], batch["target"]
    assert points.dtype == torch.float64 and points.shape == target.shape == (2, 4, 3)
    assert mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert batch["net_input"]["text"].tolist() == [[0, 1], [1, UNKNOWN]]
    whole = NORMALISATION.apply(lines[0].points)
    np.testing.assert_allclose(points[0].numpy(), whole[:-1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(target[0].numpy(), whole[1:], rtol=0, atol=1e-6)
    assert points[:, 0, :2].tolist() == [[0, 0], [0, 0]]
    assert dataset.collater([dataset[0]])["net_input"]["mask"] is None
    assert dataset.collater([]) == {}
    # Four lines in batches of two lines of like length.
    batches = data_utils.batch_by_size(
        dataset.ordered_indices(),
        dataset.num_tokens,
        dataset.num_tokens_vec(dataset.ordered_indices()),
        max_sentences=2,
    )
    assert [list(map(int, part)) for part in batches] == [[2, 0], [3, 1]]


def test_cut_and_chosen_lines(tmp_path):
    _, dataset = _dataset(tmp_path, longest=4, keep=[1, 2])
    assert dataset.sizes.tolist() == [3, 2] and len(dataset) == 2
    assert len(dataset[0]["points"]) == 4 and len(dataset[1]["points"]) == 3
    _, shuffled = _dataset(tmp_path, lengths=(4,) * 30, texts=("a",) * 30, shuffle=True)
    with data_utils.numpy_seed(1):
        one = shuffled.ordered_indices().tolist()
    with data_utils.numpy_seed(1):
        assert shuffled.ordered_indices().tolist() == one
    assert one != sorted(one) == list(range(30))


def _task(data, **options) -> HandwritingTask:
    config = HandwritingTaskConfig(**{"data": str(data), "seed": 1, "train_subset": "train"} | options)
    return HandwritingTask.setup_task(config)


@pytest.mark.parametrize("axes", ["each", "both"])
def test_scale_augmentation_scales_what_was_written(words, axes):
    task = _task(words, scale_augment=0.2, scale_axes=axes)
    task.load_dataset("train")
    dataset = task.datasets["train"]
    sample = dataset.collater([dataset[0], dataset[1], dataset[2]])
    torch.manual_seed(1)
    found = task.rescaled(sample)
    normalisation, split = task.manifest.normalisation, StrokeSplit(words, "train")
    factors = []
    for b in range(3):
        raw = split.points(b).astype(np.float64)
        n = len(raw) - 1
        again = np.concatenate([np.zeros((1, 3)), found["target"][b, :n].numpy()])
        scaled = normalisation.invert(again)[1:, :2]
        offsets = raw[1:, :2]
        factor = (scaled * offsets).sum(axis=0) / np.square(offsets).sum(axis=0)
        np.testing.assert_allclose(scaled, offsets * factor, rtol=1e-6, atol=1e-5)
        assert (0.8 <= factor).all() and (factor <= 1.2).all()
        assert (abs(factor[0] - factor[1]) < 1e-6) == (axes == "both")
        factors.append(factor[0])
        # The inputs are the same numbers, one step later, and the pen is as it was.
        np.testing.assert_array_equal(found["net_input"]["points"][b, 1:n], found["target"][b, : n - 1])
        np.testing.assert_array_equal(found["target"][b, :n, 2], raw[1:, 2])
    assert len(set(factors)) == 3
    assert (found["net_input"]["points"][:, 0] == sample["net_input"]["points"][:, 0]).all()
    torch.manual_seed(1)
    torch.testing.assert_close(task.rescaled(sample)["target"], found["target"])


def test_draws_depend_on_the_seed_and_the_batch(words, monkeypatch):
    """Batches of equal size, too, get different random numbers."""
    draws = []

    def rescaled(sample):
        draws.append(torch.rand(1).item())
        return sample

    for seed, first in ((1, 0), (1, 0), (1, 2), (2, 0)):
        task = _task(words, scale_augment=0.3, max_points=8, seed=seed)
        task.load_dataset("train")
        dataset = task.datasets["train"]
        assert dataset.shuffle
        monkeypatch.setattr(task, "rescaled", rescaled)
        sample = dataset.collater([dataset[first], dataset[first + 1]])
        task.train_step(sample, build().double(), MixtureDensity(None, "point"), Optimizer(), 1)
    assert draws[0] == draws[1] and len(set(draws)) == 3
    task.load_dataset("valid")
    assert not task.datasets["valid"].shuffle


def test_training_scales_and_validation_does_not(words):
    task = _task(words, scale_augment=0.3)
    task.load_dataset("train")
    model, criterion = build().double(), MixtureDensity(None, "point")
    dataset = task.datasets["train"]
    sample = dataset.collater([dataset[index] for index in range(4)])
    plain = criterion(model, sample)[0].item()
    losses = [
        task.train_step(sample, model, criterion, Optimizer(), update)[0].item() for update in (1, 1, 2)
    ]
    assert losses[0] == losses[1] and len({*losses, plain}) == 3
    model.eval()
    assert task.valid_step(sample, model, criterion)[0].item() == pytest.approx(plain, rel=1e-12)
    task = _task(words, scale_augment=0.0)
    assert task.train_step(sample, model, criterion, Optimizer(), 1)[0].item() == pytest.approx(plain)


def test_lines_without_a_text_are_left_out_where_texts_are_read(words, tmp_path):
    copy = tmp_path / "data"
    copy.mkdir()
    for path in words.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    names = (copy / "train.jsonl").read_text().splitlines()
    (copy / "train.jsonl").write_text("\n".join(['{"name": "a"}', *names[1:]]) + "\n")
    task = _task(copy)
    task.load_dataset("train")
    assert len(task.datasets["train"]) == 24
    config = HandwritingConfig("handwriting", hidden_size=8, mixtures=2, window=2)
    task.build_model(OmegaConf.structured(config))
    task.load_dataset("train")
    assert len(task.datasets["train"]) == 23
    (copy / "valid.jsonl").write_text('{"name": "a"}\n')
    with pytest.raises(UsageError, match="the valid split .* has no line with a text, but --window reads"):
        task.load_dataset("valid")


SMALL = ["--hidden-size", 12, "--mixtures", 3, "--recurrent-dropout", 0.1]
COMMON = ["--task", "handwriting", "--criterion", "mixture_density", "--batch-size", 8, "--cpu"]
OPTIMIZER = ["--optimizer", "adam", "--lr", 0.01, "--clip-norm", 5.0, "--num-workers", 0]
LOG = ["--log-format", "json", "--log-interval", 1]


def test_training_and_validation_through_fairseqs_programs(words, tmp_path):
    model = ["--arch", "hyperlstm_900_iam", "--hyper-size", 4, *SMALL, "--window", 2]
    arguments = [words, *COMMON, *model, *OPTIMIZER, *LOG]
    limits = ["--max-epoch", 3, "--save-dir", tmp_path, "--no-epoch-checkpoints"]
    trained = fairseq_train([*arguments, *limits])
    records = json_log(trained.stdout + trained.stderr)
    nats = [record["valid_nats_point"] for record in records if record["tag"] == "valid"]
    assert len(nats) == 3 and nats[-1] < nats[0]
    checkpoint = tmp_path / "checkpoint_last.pt"
    again = run_module(
        "fairseq_cli.validate",
        [words, "--user-dir", USER_DIR, "--task", "handwriting", "--path", checkpoint, *LOG]
        + ["--valid-subset", "valid", "--batch-size", 3, "--cpu"],
    )
    (record,) = [
        r for r in json_log(again.stdout + again.stderr) if "nats_point" in r or "valid_nats_point" in r
    ]
    found = record.get("nats_point", record.get("valid_nats_point"))
    # Logged with four decimals; the batches are others.
    assert found == pytest.approx(nats[-1], abs=2e-4)


@pytest.mark.slow
def test_two_workers_train_what_one_trains_with_two_batches_an_update(words, tmp_path):
    model = ["--arch", "handwriting", "--cell", "lstm", *SMALL]
    arguments = [words, *COMMON, *model, *OPTIMIZER, *LOG, "--max-update", 3]
    fairseq_train([*arguments, "--update-freq", 2, "--save-dir", tmp_path / "one"])
    fairseq_train([*arguments, "--save-dir", tmp_path / "two"], workers=2)
    one, two = (
        torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True)["model"]
        for name in ("one", "two")
    )
    for key in one:
        # Sums over workers and over batches round differently.
        torch.testing.assert_close(one[key], two[key], rtol=0, atol=1e-5)
