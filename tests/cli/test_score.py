"""rhhn score: reading, figures against sacreBLEU's own, significance, and what is refused."""

import json
import os

import pytest
from helpers import script_cli
from sacrebleu.metrics import BLEU, CHRF

from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.generate import scoring

score_bleu = script_cli.load("score")

REFERENCES = [
    "L'homme porte un chapeau.",
    "Deux chiens courent dans l'herbe verte.",
    "Une femme lit un livre, assise sur un banc.",
    "Aujourd'hui, il pleut.",
]
HYPOTHESES = [
    "L'homme porte une casquette.",
    "Deux chiens courent dans l'herbe.",
    "Une femme lit un livre sur un banc.",
    "Aujourd'hui, il pleut.",
]

# In the order of their lengths, with a log line, an n-best list and a U+2028, as fairseq-generate prints.
GENERATED = """\
2026-01-01 00:00:00 | INFO | fairseq_cli.generate | loading model(s)
S-2\tle troisième
T-2\ttrois\u2028mots ici
H-2\t-0.25\tle meilleur
D-2\t-0.25\tle meilleur\u2028des trois
P-2\t-0.1 -0.2
H-2\t-0.5\tle second
D-2\t-0.5\tle second
P-2\t-0.1 -0.2
S-0\tle premier
T-0\tun
H-0\t-1.5\tun
D-0\t-1.5\tun
P-0\t-0.1
S-1\t
T-1\tdeux mots
H-1\t-0.75\t
D-1\t-0.75\t
P-1\t-0.1
Generate test with beam=5: BLEU4 = 1.00
"""


def write(folder, name, lines) -> str:
    content = lines if isinstance(lines, str | bytes) else "".join(f"{line}\n" for line in lines)
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return str(path)


@pytest.fixture
def files(tmp_path):
    return write(tmp_path, "hyp.fr", HYPOTHESES), write(tmp_path, "ref.fr", REFERENCES)


def test_figures_are_sacrebleus(files, tmp_path, capsys):
    hypotheses, reference = files
    path = tmp_path / "figures.json"
    score_bleu.main([hypotheses, "--reference", reference, "--json", str(path)])
    printed, report = capsys.readouterr().out, json.loads(path.read_text())
    bleu, chrf = BLEU(), CHRF()
    expected = bleu.corpus_score(HYPOTHESES, [REFERENCES])
    assert report["sacrebleu"]["score"] == pytest.approx(expected.score, abs=1e-9)
    assert report["sacrebleu"]["signature"] == str(bleu.get_signature())
    assert report["chrf"]["score"] == pytest.approx(chrf.corpus_score(HYPOTHESES, [REFERENCES]).score)
    assert report["chrf"]["signature"] == str(chrf.get_signature())
    assert report["sentences"] == 4
    assert report["length_ratio"] == pytest.approx(expected.ratio) and expected.ratio < 1
    for part in (f"{expected.score:.2f}  nrefs:1|case:mixed|eff:no|tok:13a", f"({expected.sys_len} / "):
        assert part in printed
    assert "comparable with the papers' figures, not with sacreBLEU's" in printed


def test_tokenised_bleu_is_of_moses_tokens():
    hypotheses = ["L' homme porte une casquette .", "Deux chiens courent dans l' herbe ."]
    references = ["L' homme porte un chapeau .", "Deux chiens courent dans l' herbe verte ."]
    metric = BLEU(tokenize="none", smooth_method="none", force=True)
    expected = metric.corpus_score(hypotheses, [references]).score
    found = scoring.tokenised_bleu(HYPOTHESES[:2], REFERENCES[:2])
    assert found == pytest.approx(expected, abs=1e-9)
    # sacreBLEU's tokeniser leaves "L'homme" whole, so this is another figure.
    assert abs(found - BLEU().corpus_score(HYPOTHESES[:2], [REFERENCES[:2]]).score) > 1
    # By English rules "l'homme" holds "'homme", which is not "homme", and no four words agree.
    pair = ["un homme dort bien ici"], ["l'homme dort bien ici"]
    assert scoring.tokenised_bleu(*pair, "fr") > 0 == scoring.tokenised_bleu(*pair, "en")
    # Unsmoothed, no two words in common is 0.
    assert scoring.tokenised_bleu(["un chat"], ["un chien"]) == 0


def test_generated_output_is_put_in_order(tmp_path):
    found = scoring.read_translations(write(tmp_path, "generate.txt", GENERATED))
    assert found.hypotheses == ["un", "", "le meilleur\u2028des trois"]
    assert found.references == ["un", "deux mots", "trois\u2028mots ici"]


def test_pieces_are_joined_and_h_lines_serve_without_d_lines(tmp_path):
    lines = ["H-1\t-1\t▁le ▁ch at", "H-0\t-1\t▁un", "T-0\t▁u n", "T-1\t▁le ▁chat"]
    found = scoring.read_translations(write(tmp_path, "generate.txt", lines))
    assert found.hypotheses == ["un", "le chat"] == found.references


def test_raw_references_go_before_those_of_the_output(tmp_path, capsys):
    generated = write(tmp_path, "generate.txt", GENERATED)
    score_bleu.main([generated])
    assert "reference     the T- lines of" in capsys.readouterr().out
    raw = write(tmp_path, "raw.fr", ["un", "", "le meilleur\u2028des trois"])
    score_bleu.main([generated, "--reference", raw])
    printed = capsys.readouterr().out
    assert f"reference     {raw}\nsentences     3\n" in printed and "chrF          100.00" in printed


def test_lines_end_at_the_newline_only(tmp_path):
    lines = "un\u2028deux\x85trois\rquatre\r\ncinq\n".encode()
    assert scoring.read_translations(write(tmp_path, "a.fr", lines)).hypotheses == [
        "un\u2028deux\x85trois\rquatre",
        "cinq",
    ]


def test_bootstrap_tells_systems_apart_and_is_seeded():
    references = [f"la phrase numéro {n} parle de {n * 7} chats et de {n * 3} chiens" for n in range(60)]
    worse = [line.replace("chats", "loups").replace("parle", "dit") for line in references]
    # As good as each other: one is wrong in every even sentence, the other in every odd one.
    even, odd = (
        [worse[n] if n % 2 == rest else line for n, line in enumerate(references)] for rest in (0, 1)
    )

    def p_values(system, baseline, **options):
        pair = (scoring.Translations(name, texts) for name, texts in (("a", system), ("b", baseline)))
        report = scoring.paired_bootstrap(*pair, references, samples=200, **options)
        return report["sacrebleu"]["p_value"], report["chrf"]["p_value"], report

    *better, report = p_values(references, worse)
    assert max(better) < 0.05
    assert report["sacrebleu"]["score"] == pytest.approx(100) and report["sacrebleu"]["baseline_score"] < 70
    assert "|bs:200|seed:12345|" in report["sacrebleu"]["signature"]
    assert p_values(worse, worse)[:2] == (1.0, 1.0)
    *chance, report = p_values(even, odd)
    assert min(chance) > 0.05
    assert p_values(even, odd)[2] == report
    assert p_values(even, odd, seed=7)[2]["sacrebleu"] != report["sacrebleu"]
    assert "SACREBLEU_SEED" not in os.environ


def test_the_program_compares_two_systems(files, tmp_path, capsys):
    hypotheses, reference = files
    options = ["--reference", reference, "--baseline", reference, "--samples", "20", "--seed", "5"]
    score_bleu.main([hypotheses, *options])
    printed = capsys.readouterr().out
    assert f"paired bootstrap against {reference} (20 resamplings, seed 5)" in printed
    assert "against 100.00: p = " in printed
    for option in ("--samples", "--seed"):
        with pytest.raises(UsageError, match="have no effect without --baseline"):
            score_bleu.main([hypotheses, "--reference", reference, option, "20"])


REFUSED = {
    "counts": (HYPOTHESES[:3], REFERENCES, "3 sentences and {ref} has 4: line 4 of {ref} has no counterpart"),
    "missing number": (["D-0\t0\ta", "D-2\t0\tb"], REFERENCES, "{hyp}: no line D-1, although there is D-2"),
    "second hypothesis": (
        ["D-0\t0\ta", "D-1\t0\tb", "D-0\t0\tc"],
        REFERENCES,
        "{hyp}: line 3 is D-0 for the second time",
    ),
    "bytes": (b"un\ndeux \xe9t\xe9\n", REFERENCES, "{hyp}: line 2 is not UTF-8 (byte 6 of the line, 0xe9)"),
    "references in the output": (["D-0\t0\ta", "D-1\t0\tb", "T-0\ta"], None, "2 hypotheses and 1 references"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line(case, tmp_path, capsys):
    hypotheses, references, reason = REFUSED[case]
    names = {"hyp": write(tmp_path, "hyp", hypotheses), "ref": write(tmp_path, "ref", references or "")}
    arguments = [names["hyp"]]
    arguments += [] if references is None else ["--reference", names["ref"]]
    assert cli.run(lambda: score_bleu.main(arguments)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert reason.format(**names).lower() in error.lower()


@pytest.mark.parametrize("form", ["text", "generated"])
@pytest.mark.parametrize("cut", [lambda word: "@@ ".join(word), lambda word: f"\u2581{word}"])
def test_pieces_are_scored_as_their_text_is(cut, form, tmp_path):
    """Figures of pieces differ: 0.4 instead of 58.5 for these sentences."""
    lines = [" ".join(map(cut, line.split())) for line in HYPOTHESES]
    assert BLEU().corpus_score(lines, [REFERENCES]).score < 20
    if form == "generated":
        lines = [f"{kind}-{i}\t-1\t{line}" for i, line in enumerate(lines) for kind in "HP"]
    found = scoring.read_translations(write(tmp_path, "hypotheses.fr", lines))
    assert found.hypotheses == HYPOTHESES


def test_a_numbered_line_of_a_text_is_text(tmp_path):
    lines = ["un", "H-3\tau lait", "D-7\t-0.5\tdes trois", "a \u2581 b", "deux @@ trois"]
    found = scoring.read_translations(write(tmp_path, "a.fr", lines))
    assert found.hypotheses == lines


def test_references_with_unknown_pieces_are_counted(tmp_path, capsys):
    path = write(tmp_path, "gen.txt", GENERATED.replace("T-0\tun", "T-0\tun <<unk>>"))
    score_bleu.main([path])
    assert ": 1 of 3 hold unknown pieces, --reference names the raw text" in capsys.readouterr().out
    score_bleu.main([write(tmp_path, "known.txt", GENERATED)])
    assert "hold unknown" not in capsys.readouterr().out
