"""The papers' tables from one command: rows, commands, records, pages, and runs that are interrupted."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fairseq.models import MODEL_REGISTRY
from helpers.cli import HANGS
from helpers.script_cli import SCRIPTS, error_of
from helpers.tiny_char_lm import write_corpus

from rhhn_fairseq import cli
from rhhn_fairseq.commands import reproduce
from rhhn_fairseq.describe import build_empty, count_parameters
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.reproduce import corpora, plan, program, report, running
from rhhn_fairseq.reproduce.plan import Budget, Run
from rhhn_fairseq.reproduce.records import Cost, Record
from rhhn_fairseq.reproduce.tables import TABLES, table_of

ROWS = [(table, row) for table in TABLES.values() for row in table.rows]
HA, SU = TABLES["ha-ptb"], TABLES["su-ptb"]


def refused(capsys, *arguments) -> str:
    return error_of(lambda *words: cli.run(lambda: reproduce.main(list(map(str, words)))), capsys, *arguments)


@pytest.mark.parametrize("table, row", ROWS, ids=[f"{table.name}-{row.name}" for table, row in ROWS])
def test_a_row_is_an_architecture_with_figures_that_its_table_has(table, row):
    assert row.arch in MODEL_REGISTRY
    assert set(row.reported) <= {name for name, _, _ in table.scoring.figures()}
    assert count_parameters(build_empty(row.arch)) == row.parameters


@pytest.mark.parametrize(
    "name, reported",
    [
        ("ln_hyperlstm_ptb", {"valid bpc carry": 1.281, "test bpc carry": 1.250}),
        ("lstm_ptb", {"valid bpc carry": 1.347, "test bpc carry": 1.312}),
    ],
)
def test_the_paper_s_figures(name, reported):
    assert HA.row(name).reported == reported


def test_options_of_a_run_are_the_row_s_the_budget_s_and_the_seed():
    run = Run(SU, SU.row("hyperrhn_ptb"), seed=3, precision="bfloat16", budget=Budget(epochs=4, hours=1.5))
    assert run.options() == {
        "arch": "hyperrhn_ptb",
        "seed": 3,
        "max_epoch": 4,
        "stop_time_hours": 1.5,
        "bf16": True,
    }
    assert run.name == "hyperrhn_ptb-s3"


def test_rows_of_the_report_on_h_detach_and_of_handwriting_without_dropout():
    """Didolkar 2019, section 4 and figures 2, 4 and 5; Ha et al. 2016, table 3, footnote 1."""
    copying, mnist, iam = TABLES["copying"], TABLES["mnist"], TABLES["ha-iam"]
    sweep = {row.options["h_detach"] for row in copying.rows if row.options.get("h_detach")}
    assert {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9} <= sweep
    assert copying.row("lstm_T100_cdetach_0.5").options["c_detach"] == 0.5
    words = plan.flags(Run(mnist, mnist.row("mnist_lstm_hdetach_unclipped")).options())
    assert words[words.index("--clip-norm") + 1] == "0.0" and words[words.index("--h-detach") + 1] == "0.25"
    assert Run(mnist, mnist.row("mnist_lstm_lr0.0005")).options()["lr"] == 5e-4
    assert mnist.row("mnist_lstm_cdetach").options["c_detach"] == 0.25
    plain = iam.row("lstm_3x400_iam_plain")
    assert plain.reported == {"valid nats_seq": -1039.0} and set(plain.options.values()) == {0.0}


def test_rows_are_trained_and_scored_as_their_papers_do(tmp_path):
    """Ha's handwriting on Graves's split, which has no test set; Didolkar's 200 epochs; GNMT's search."""
    iam = table_of("ha-iam")
    assert corpora.CORPORA[iam.corpus].options == ("--protocol", "graves") and iam.scoring.subsets == (
        "valid",
    )
    assert table_of("copying").row("lstm_T100_hdetach_0.1").options["max_epoch"] == 200
    wmt = table_of("ha-wmt")
    run = Run(wmt, wmt.row("lstm_gnmt"))
    (command,) = plan.evaluation_commands(run, tmp_path, tmp_path, "cpu").values()
    assert "--beam 8 --length-penalty gnmt:0.2 --coverage-penalty 0.2" in " ".join(command)


def test_a_scaled_run_follows_the_rule():
    options = Run(SU, SU.row("hyperrhn_ptb"), scale=0.1).options()
    assert options["hidden_size"] == 100 and options["hyper_size"] == 12 and options["batch_size"] == 26
    assert options["max_epoch"] == 7
    copying = TABLES["copying"]
    options = Run(copying, copying.row("lstm_T300"), scale=0.1).options()
    assert options["length"] == 30 and options["hidden_size"] == 12 and options["batch_size"] == 10


def test_a_budget_given_for_a_scaled_run_takes_precedence():
    assert Run(HA, HA.row("lstm_ptb"), scale=0.5, budget=Budget(epochs=2)).options()["max_epoch"] == 2


def test_flags_are_typed_as_fairseq_reads_them():
    options = {"a_b": 1, "c": True, "d": False, "e": None, "f": "x y"}
    assert plan.flags(options) == ["--a-b", "1", "--c", "--f", "x y"]


@pytest.mark.parametrize(
    "table, text, figure",
    [
        ("ha-ptb", "PTB, test, protocol carry: 1.250000 bits per character, perplexity 2.4", 1.25),
        ("ha-ptb", "x: 1.25 bits per character, y\nat most 1.27 bits per character of PTB char", 1.25),
        ("copying", 'valid | {"valid_loss": "1.8", "valid_accuracy": "7.43", "valid_bsz": "9"}', 7.43),
        ("ha-iam", 'valid | {"valid_loss": "-1.7", "valid_nats_seq": "-244.06"}', -244.06),
        ("ha-wmt", "Generate test with beam=5: BLEU = 38.95 66.1/44.0/32.0/24.0", 38.95),
        ("ha-wmt", "BLEU = 1.5 9.9/3.0\nBLEU = 38.95 66.1/44.0", 38.95),
        ("mnist", "Traceback", None),
    ],
)
def test_a_figure_is_read_from_what_the_evaluation_printed(table, text, figure):
    assert running._read_figure(TABLES[table].scoring, text) == figure


@pytest.mark.slow
def test_problems_are_evaluated(tmp_path):
    words = ["copying", "lstm_T100_hdetach_0.25", "--updates", "2", "--scale", "0.1", "--device", "cpu"]
    words += ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    command = [sys.executable, str(SCRIPTS / "reproduce.py"), *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert result.returncode == 0, result.stderr
    path = tmp_path / "results" / "runs" / "copying" / "lstm_T100_hdetach_0.25-x0.1-s1.json"
    assert set(Record.load(path).figures) == {"valid accuracy", "test accuracy"}


@pytest.mark.parametrize(
    "line, stop",
    [
        ("Stopping training due to num_updates: 3 >= max_update: 3", "updates"),
        ("Stopping training due to cumulative_training_time: 2 > stop_time_hours: 1 hour(s)", "hours"),
        ("early stop since valid performance hasn't improved for last 3 runs", "patience"),
        ("done training in 3 seconds", "epochs"),
    ],
)
def test_what_ended_a_training(line, stop):
    assert running._stop(f"first\n{line}\nlast\n") == stop
    if stop != "epochs":
        # The log of a training that was continued tells of both ends.
        assert running._stop(f"Stopping training due to num_updates: 1 >= max_update: 1\n{line}\n") == stop


def test_a_cost_of_too_few_updates_is_refused(corpus, tmp_path):
    words = arguments(corpus, tmp_path, "--cost", "--updates", 3)
    with pytest.raises(UsageError, match="--cost --updates 3 is too small, the smallest is 4"):
        reproduce.main(words)


@pytest.mark.slow
def test_a_cost_keeps_its_remark(corpus, tmp_path):
    reproduce.main(arguments(corpus, tmp_path, "--cost", "--updates", 4, "--remark", "a small text"))
    cost = Cost.load(tmp_path / "results" / "runs" / "ha-ptb" / "costs" / "lstm_ptb.json")
    assert cost.seconds_per_update > 0 and cost.updates_per_epoch > 0 and cost.remark == "a small text"


def test_a_cost_of_a_smaller_model_is_refused(corpus, tmp_path):
    with pytest.raises(UsageError, match="--cost measures a row at full size; leave out --scale 0.5"):
        reproduce.main(arguments(corpus, tmp_path, "--cost", "--scale", 0.5))


def test_a_cost_that_cannot_be_measured_does_not_stop_the_next(tmp_path, monkeypatch, capsys):
    measured = Cost("ln_lstm_ptb", "float32", 0.5, 10, "a processor", 1)

    def measure(run, *_):
        if run.row.name == "lstm_ptb":
            raise UsageError("out of memory")
        return measured

    monkeypatch.setattr(running, "measure_cost", measure)
    words = ["ha-ptb", "lstm_ptb", "ln_lstm_ptb", "--cost", "--results", str(tmp_path)]
    with pytest.raises(UsageError, match="1 of 2 runs failed: lstm_ptb-s1"):
        reproduce.main(words)
    printed = capsys.readouterr()
    assert "ha-ptb ln_lstm_ptb: 0.5 s an update" in printed.out
    assert printed.err == "ha-ptb lstm_ptb-s1: out of memory\n"


def test_a_log_that_cannot_be_adopted_leaves_no_link(corpus, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "checkpoint_best.pt").touch()
    (tmp_path / "typo.log").write_text("no figures\n")
    with pytest.raises(UsageError, match=r"typo\.log"):
        reproduce.main(arguments(corpus, tmp_path, "--adopt", tmp_path / "typo.log", tmp_path / "mine"))
    assert not list((tmp_path / "runs").rglob("checkpoints"))


def test_a_checkpoint_of_other_sizes_is_not_adopted(corpus, tmp_path):
    """Nor is a log without the table's figure."""
    model = {"_name": "char_lm", "cell": "lstm", "hidden_size": 16, "layers": 1}
    saved = {"model": {}, "cfg": {"model": model, "task": {"_name": "char_lm"}}}
    (tmp_path / "mine").mkdir()
    torch.save(saved, tmp_path / "mine" / "checkpoint_best.pt")
    log = tmp_path / "run.log"
    words = arguments(corpus, tmp_path, "--adopt", log, tmp_path / "mine")
    for figure, reason in (
        ("loss", "run.log: has no epoch with the figure bpc, which ha-ptb reports"),
        ("bpc", "checkpoint_best.pt: its model has hidden_size 16, but lstm_ptb has 1000"),
    ):
        log.write_text(f'{{"epoch": 1, "train_{figure}": "2", "train_num_updates": "3"}}\n')
        with pytest.raises(UsageError, match=reason):
            reproduce.main(words[: words.index("--")])
    assert not list((tmp_path / "runs").rglob("checkpoints")) and not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    "line, message",
    [
        ("ha-ptb --epcohs 3", "unrecognized arguments: --epcohs 3"),
        ("ha-ptb --epochs 0", "--epochs 0 is too small"),
        ("ha-ptb --remark it's", "No closing quotation"),
    ],
)
def test_a_queue_is_read_before_its_first_line_runs(tmp_path, monkeypatch, line, message):
    (tmp_path / "queue").write_text(f"ha-ptb --render\n{line}\n")
    monkeypatch.setattr(program, "_reproduce", None)
    with pytest.raises(UsageError, match=f"queue: line 2: {message}"):
        reproduce.main(["--queue", str(tmp_path / "queue")])


def test_a_dry_run_of_a_queue_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(running, "execute", None)
    monkeypatch.setattr(program.os, "nice", None)
    (tmp_path / "queue").write_text("# tonight\nha-ptb lstm_ptb\nmnist --render\n")
    reproduce.main(["--queue", str(tmp_path / "queue"), "--dry-run"])
    assert "--arch lstm_ptb" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--threads: --queue takes its options from the file"):
        reproduce.main(["--queue", str(tmp_path / "queue"), "--threads", "2"])
    with pytest.raises(UsageError, match="-- --lr 0.1: --queue takes its options from the file"):
        reproduce.main(["--queue", str(tmp_path / "queue"), "--", "--lr", "0.1"])


def test_a_queue_goes_on_after_a_defect(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program.os, "nice", lambda _: None)
    (tmp_path / "queue").write_text(
        f"mnist --render --results {tmp_path}/a\nmnist --render --results {tmp_path}\n"
    )
    render = report.render

    def fail_once(table, results, command=None):
        if results.name == "a":
            raise ZeroDivisionError
        return render(table, results, command)

    monkeypatch.setattr(report, "render", fail_once)
    with pytest.raises(UsageError, match="1 of 2 lines failed"):
        reproduce.main(["--queue", str(tmp_path / "queue")])
    assert (tmp_path / "mnist.md").exists() and "ZeroDivisionError" in capsys.readouterr().err


def test_paths_that_cannot_be_used_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file/x: cannot be made"):
        reproduce.main(["ha-ptb", "--render", "--results", str(tmp_path / "file" / "x")])


@pytest.mark.slow
def test_a_cost_is_measured_beside_a_checkpoint(corpus, tmp_path):
    checkpoints = tmp_path / "runs" / "ha-ptb" / "lstm_ptb-s1" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "checkpoint_last.pt").write_text("not read")
    reproduce.main(arguments(corpus, tmp_path, "--cost", "--updates", 4))
    assert (tmp_path / "results" / "runs" / "ha-ptb" / "costs" / "lstm_ptb.json").exists()


def test_a_run_that_cannot_be_evaluated_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    def execute(run, places, threads, device):
        if run.seed == 1:
            raise UsageError("no figure")
        state = "failed" if run.seed == 3 else "finished"
        return Record("ha-ptb", "lstm_ptb", "lstm_ptb", run.seed, 1.0, "float32", state=state)

    monkeypatch.setattr(program.running, "execute", execute)
    words = ["ha-ptb", "lstm_ptb", "--results", str(tmp_path)]
    with pytest.raises(UsageError, match="2 of 3 runs failed: lstm_ptb-s1, lstm_ptb-s3"):
        reproduce.main([*words, "--seeds", "1", "2", "3", "--remark", "a note"])
    assert Record.load(tmp_path / "runs" / "ha-ptb" / "lstm_ptb-s2.json").remark == "a note"
    page = (tmp_path / "ha-ptb.md").read_text()
    assert "lstm_ptb-s2: finished" in capsys.readouterr().out and "--seeds 1 2 3 --remark 'a note'" in page
    # A command whose runs were all refused does not stand on the page.
    with pytest.raises(UsageError, match="2 of 2 runs failed"):
        reproduce.main([*words, "--seeds", "1", "1"])
    assert (tmp_path / "ha-ptb.md").read_text() == page


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["ha-ptp"], "ha-ptp is no table, choose from su-ptb, ha-ptb"),
        (["ha-ptb", "lstm"], "ha-ptb has no row lstm, it has lstm_ptb"),
        ([], "no table is named"),
        (["ha-ptb", "--scale", "2"], "--scale 2 is not in (0, 1]"),
        (["ha-ptb", "--scale", "0"], "--scale 0 is not in (0, 1]"),
        (["ha-wmt", "--scale", "0.5"], "ha-wmt has no smaller form"),
        (["ha-ptb", "--epochs", "0"], "--epochs 0 is too small"),
        (["ha-ptb", "--hours", "nan"], "--hours nan is not a number above 0"),
        (["ha-ptb", "--hours", "inf"], "--hours inf is not a number above 0"),
        (["ha-ptb", "--seeds", "1", "99999999999"], "--seed 99999999999 is not possible"),
        (
            ["ha-ptb", "--seeds", "1", "2", "lstm_ptb"],
            "argument --seeds: lstm_ptb is not a whole number; give TABLE and every ROW before --seeds",
        ),
        (["copying", "--from-dir", "x"], "--from-dir x: copying reads no files, its data are generated"),
        (["ha-ptb", "--cost", "--render"], "argument --render: not allowed with argument --cost"),
        (["ha-ptb", "--adopt", "a", "b", "--dry-run"], "--dry-run: not allowed with argument --adopt"),
        (["ha-ptb", "--adopt", "a", "b"], "--adopt takes over one run, 8 are named"),
        (["ha-iam", "lstm_900_iam"], "--from-dir is not given: iam-graves cannot be downloaded"),
        (
            ["su-ptb", "--protocols", "carry:2"],
            "--protocols carry:2: su-ptb has window:100/95, window:100/50",
        ),
        (["--queue", "missing.txt"], "missing.txt"),
    ],
)
def test_mistakes_end_in_one_line(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *arguments)


def test_only_named_protocols_are_evaluated():
    run = Run(SU, SU.row("rhn_ptb"), protocols=("carry",))
    assert [name for name, _, _ in run.figures()] == ["valid bpc carry", "test bpc carry"]


def test_the_list_needs_no_data(capsys):
    reproduce.main(["ha-wmt", "--list"])
    out = capsys.readouterr().out
    assert "hyperlstm_gnmt" in out and "test bleu 40.03; 1,000,000 updates" in out


def test_a_dry_run_prints_the_commands(capsys, tmp_path):
    reproduce.main(
        ["su-ptb", "rhn_ptb", "--dry-run", "--epochs", "2", "--data", str(tmp_path), "--", "--lr", "1e-4"]
    )
    train, *evaluations = capsys.readouterr().out.splitlines()
    assert train.startswith(
        f"python -m fairseq_cli.train --user-dir rhhn_fairseq {tmp_path}/ptb --arch rhn_ptb"
    )
    assert "--max-epoch 2" in train and train.endswith("--lr 1e-4")
    assert len(evaluations) == 6 and all("--protocol" in line for line in evaluations)
    assert "--bf16" not in train
    reproduce.main(["su-ptb", "rhn_ptb", "--dry-run", "--precision", "bfloat16", "--data", str(tmp_path)])
    assert " --bf16" in capsys.readouterr().out.splitlines()[0]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    data = tmp_path_factory.mktemp("data")
    Path(write_corpus(data)).rename(data / "ptb")
    return data


def arguments(corpus, tmp_path, *more) -> list[str]:
    small = ["--hidden-size", 16, "--batch-size", 2, "--tokens-per-sample", 5, "--log-interval", 1]
    places = ["--data", corpus, "--runs", tmp_path / "runs", "--results", tmp_path / "results"]
    return list(map(str, ["ha-ptb", "lstm_ptb", "--device", "cpu", *places, *more, "--", *small]))


@pytest.mark.slow
def test_a_killed_run_goes_on_and_a_finished_one_is_left_alone(corpus, tmp_path, capsys):
    words = [sys.executable, str(SCRIPTS / "reproduce.py"), *arguments(corpus, tmp_path, "--epochs", 3)]
    words += ["--save-interval-updates", "10"]
    log = tmp_path / "runs" / "ha-ptb" / "lstm_ptb-s1" / "train.log"
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: log.exists() and '"num_updates": "70"' in log.read_text())
    process.kill()
    process.wait()
    # The training ends with what ran it, and saves.
    wait_for(lambda: not list_children(log.parent))
    first = json.loads((tmp_path / "results" / "runs" / "ha-ptb" / "lstm_ptb-s1.json").read_text())
    assert first["state"] == "training"
    # In the second epoch, the record has the first.
    assert first["epochs"] == len(first["curve"]) == 1 and first["curve"][0]["valid"]["bpc"] > 0
    assert first["updates"] == first["curve"][0]["updates"] < 70

    result = subprocess.run(words, capture_output=True, text=True, timeout=HANGS)
    assert result.returncode == 0, result.stderr
    assert "Loaded checkpoint" in log.read_text()
    record = Record.load(tmp_path / "results" / "runs" / "ha-ptb" / "lstm_ptb-s1.json")
    assert record.state == "finished" and record.epochs == 3 and record.stopped_by == "epochs"
    assert set(record.figures) == {"valid bpc carry", "test bpc carry"}
    page = (tmp_path / "results" / "ha-ptb.md").read_text()
    # The small text of this test stands in for PTB, and the page says so.
    assert "| lstm_ptb |" in page and record.corpus.startswith("user text") and record.corpus in page

    size = log.stat().st_size
    assert subprocess.run(words, capture_output=True, timeout=HANGS).returncode == 0
    assert log.stat().st_size == size
    # Further with a larger budget, from where it was.
    longer = [word if word != "3" else "4" for word in words]
    assert subprocess.run(longer, capture_output=True, timeout=HANGS).returncode == 0
    assert Record.load(tmp_path / "results" / "runs" / "ha-ptb" / "lstm_ptb-s1.json").epochs == 4


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="Linux schedules no sessions as groups")
def test_a_program_has_the_priority_of_its_parent():
    """A queue has the lowest, and so have its trainings; that of the terminal stays."""
    show = "print(open('/proc/self/autogroup').read())"
    start = (
        "import os, sys; from rhhn_fairseq.reproduce.running import Program; os.nice(19)\n"
        f"with Program([sys.executable, '-c', {show!r}], 1) as program: print(*program)\n{show}"
    )
    result = subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, timeout=HANGS, start_new_session=True
    )
    assert re.findall(r"nice (\S+)", result.stdout) == ["19", "0"], result.stdout + result.stderr


@pytest.mark.slow
def test_a_queue_goes_on_after_a_line_that_fails(corpus, tmp_path):
    queue = tmp_path / "queue.txt"
    good, bad = arguments(corpus, tmp_path, "--updates", 3), arguments(corpus, tmp_path, "--updates", 3)
    queue.write_text("# tonight\n" + " ".join(bad[:1] + ["lstm_1250_ptb"] + bad[2:] + ["--lr", "-1"]) + "\n")
    queue.write_text(queue.read_text() + " ".join(good) + "\n")
    command = [sys.executable, str(SCRIPTS / "reproduce.py"), "--queue", str(queue)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(f"error: {queue}: 1 of 2 lines failed")
    results = tmp_path / "results" / "runs" / "ha-ptb"
    assert Record.load(results / "lstm_ptb-s1.json").state == "finished"
    failed = Record.load(results / "lstm_1250_ptb-s1.json")
    assert failed.state == "failed" and "--lr" in failed.problem


@pytest.mark.slow
def test_a_training_by_hand_is_adopted(corpus, tmp_path):
    words = arguments(corpus, tmp_path, "--updates", 4)
    run = [sys.executable, str(SCRIPTS / "reproduce.py")]
    assert subprocess.run([*run, *words], capture_output=True, timeout=HANGS).returncode == 0
    done = tmp_path / "runs" / "ha-ptb" / "lstm_ptb-s1"
    other = tmp_path / "adopted"
    more = ["--adopt", done / "train.log", done / "checkpoints"]
    words = arguments(corpus, other, *more)
    result = subprocess.run([*run, *words], capture_output=True, text=True, timeout=HANGS)
    assert result.returncode == 0, result.stderr
    adopted = Record.load(other / "results" / "runs" / "ha-ptb" / "lstm_ptb-s1.json")
    assert adopted.adopted and adopted.state == "finished" and adopted.updates == 4
    mine = Record.load(tmp_path / "results" / "runs" / "ha-ptb" / "lstm_ptb-s1.json")
    assert adopted.figures == mine.figures and adopted.curve == mine.curve
    # It has no checkpoints of its own to train on from, so more updates are refused, not passed over.
    more = subprocess.run(
        [*run, *arguments(corpus, other, "--updates", 8)], capture_output=True, text=True, timeout=HANGS
    )
    assert more.returncode == 1 and "adopted from" in more.stderr, more.stderr


def wait_for(condition) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def list_children(directory: Path) -> list[int]:
    """Processes with a directory on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(directory).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
