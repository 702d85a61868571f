"""The report of a run: what stands in it, what it says of what is not there, and that it needs nothing else."""

import json
import re
import sys
from base64 import b64decode
from html.parser import HTMLParser
from importlib import import_module
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from run_folder import BATCH, PROMPTS, STEPS, TIMES, evaluation, validation, write_bare_run, write_picture, write_run

from unet_attn.report import MOST_GRIDS, as_html, write_report
from unet_attn.report_page import LARGEST_PICTURE, data_uri
from unet_attn.run_record import read_run
from unet_attn.scores import score_rows

ROOT = Path(__file__).resolve().parent.parent


class Page(HTMLParser):
    """The parts of a page: its text, the addresses it names, its tags and sections."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.addresses, self.tags, self.sections = "", [], [], []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in {"src", "href", "srcset", "data", "action", "poster", "xlink:href"}:
                self.addresses.append(value)
            if tag == "h2" and name == "id":
                self.sections.append(value)

    def handle_data(self, data: str) -> None:
        if self.lasttag != "style":
            self.text += data + " "


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "full")


@pytest.fixture(scope="module")
def page(full: Path) -> Page:
    path = write_report(full)
    assert path == full / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def test_a_full_run_has_every_section(page: Page) -> None:
    assert page.sections == [
        "curves",
        "noise",
        "validation",
        "grids",
        "scores",
        "copies",
        "throughput",
        "data",
        "skipped",
        "settings",
    ]
    for told in (
        "trained from scratch on 1,200 pictures of pictures of <mine>, 16 x 16 grey.",
        f"{STEPS * BATCH:,} pictures seen, each {STEPS * BATCH / 1200:.1f} times",
        "1 h 2 min of training",
        "0.1680 validation loss",  # 0.16 x (1 + 50 / 1000)
        "Measured on 127 pictures that are held out of training",
        "1 step was skipped, as loss or gradient was not finite: 11.",
        "42.77 ± 10.79",
        "of the training pictures themselves 0.125 ± 0.022",
        *(f"{row.name} {row.value} {row.tells}" for row in score_rows(evaluation())),
        "0.991 a/lock.png 17",
        "10.0% of the time waited for data",
        "1.25 GiB",
        "1,327 pictures in pictures of <mine>, 16 x 16 grey",
        "truncated /home/me/a&b.png ends early",
        "time_sampling: logit_normal",
    ):
        assert told in " ".join(page.text.split()), told


def test_the_page_needs_no_other_file_no_network_and_no_script(page: Page) -> None:
    assert page.addresses and all(re.match(r"data:image/(png|jpeg);base64,|#", each) for each in page.addresses)
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    linked = [each[1:] for each in page.addresses if each.startswith("#")]
    assert linked == page.sections


def test_what_users_write_is_shown_and_never_run(full: Path, page: Page) -> None:
    html = (full / "report.html").read_text(encoding="utf-8")

    assert f"prompts: {', '.join(PROMPTS)}" in " ".join(page.text.split())
    assert "<script" not in html and "<b>lock" not in html and "<mine>" not in html
    assert "&lt;script&gt;alert(1)" in html


def test_the_same_folder_gives_the_same_bytes_however_it_is_named(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = write_report(full).read_bytes()
    monkeypatch.chdir(full)

    assert write_report(Path(".")).read_bytes() == before


def test_a_run_of_the_first_release_is_told_what_would_measure_the_rest(tmp_path: Path) -> None:
    run = write_bare_run(tmp_path / "old", steps=53, all_keys=False)
    evaluate = "python scripts/evaluate.py runs/old --data.path '/home/me/pictures of <mine>'"

    page = Page(as_html(read_run(run)))

    assert page.sections == ["curves", "noise", "validation", "grids", "scores", "throughput", "data", "settings"]
    assert page.text.count(evaluate) == 3  # noise, validation, scores
    assert "python scripts/inspect_data.py '/home/me/pictures of <mine>'" in page.text
    assert "python scripts/sample.py runs/old --prompt 'a caption'" in page.text
    assert "53 of 1,009" in page.text
    assert "Memory and the wait for data were not recorded" in page.text


def test_a_run_that_was_evaluated_but_not_validated_shows_what_the_evaluation_found(tmp_path: Path) -> None:
    run = write_bare_run(tmp_path / "old", steps=53, all_keys=False)
    figures, measured = evaluation(), validation(1000)
    figures["loss"] = {**figures["loss"], "pictures": 251, "times": TIMES, "by_time": measured["by_time"]}
    (run / "evaluation.json").write_text(json.dumps(figures), encoding="utf-8")

    html = as_html(read_run(run))
    text = " ".join(Page(html).text.split())

    assert text.count("python scripts/evaluate.py") == 1  # the sheet of copies, which is not there
    assert "Not recorded by this run" not in text and "This measures loss and gap" not in text
    assert "train.validate_every does that" in text
    assert "evaluate.py measured the model as it was then on 251 pictures that training never saw" in text
    assert "loss 0.1600 ± 0.0032 loss with another picture's caption 0.3700 ± 0.0074" in text
    assert "gap, another picture's caption 0.2129 ± 0.0043 gap, no caption 0.0768 ± 0.0015" in text
    drawn = html[html.index("Evaluation by noise level") :]
    lines = re.findall(r'<g class="line\d">.*?points="(.*?)".*?<text.*?>(\w+)</text></g>', drawn)
    assert {name: len(points.split()) for points, name in lines} == {"true": 5, "exchanged": 5, "empty": 5}

    figures["loss"] |= {"on_training_data": None, "trained_on": 17}
    (run / "evaluation.json").write_text(json.dumps(figures), encoding="utf-8")
    told = "as it was then on 251 pictures, of which it was trained on 17, at fixed noise"
    assert told in as_html(read_run(run))

    # a validation of the run itself comes first
    (run / "logs/validation.jsonl").write_text(json.dumps(measured) + "\n", encoding="utf-8")
    html = as_html(read_run(run))
    assert "Last validation by noise level" in html and "Evaluation by noise level" not in html
    assert "as it was then" not in html


def test_an_evaluation_without_the_training_pictures_says_so_and_asks_for_no_other(tmp_path: Path) -> None:
    run = write_bare_run(tmp_path / "run", steps=3, text=False)
    loss = {"empty": {"value": 0.25, "error": 0.01}, "pictures": 1, "on_training_data": None}
    figures = {"copies": {"skipped": "the run's training pictures are not here"}, "nearest": [], "loss": loss}
    (run / "evaluation.json").write_text(json.dumps(figures), encoding="utf-8")

    text = " ".join(Page(as_html(read_run(run))).text.split())

    assert "Copies Not counted: the run's training pictures are not here." in text
    assert "evaluate.py measured the model as it was then on 1 picture, at fixed noise. value ± standard" in text
    assert "loss 0.2500 ± 0.0100" in text and "python scripts/evaluate.py" not in text


def test_a_run_without_text_speaks_of_no_captions(tmp_path: Path) -> None:
    run = write_bare_run(tmp_path / "wordless", steps=7, text=False)
    line = {"step": 5, "held_out": False, "pictures": 3, "times": [0.1, 0.9], "by_time": {"empty": [0.2, 0.4]}}
    line |= {"empty": {"value": 0.3, "error": 0.1}, "true": None, "exchanged": None, "gap_empty": None}
    (run / "logs/validation.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")

    page = Page(as_html(read_run(run)))

    assert "A model without text" in page.text and "caption" not in page.text.split("config.yaml")[0]
    assert "3 pictures that are also trained on" in page.text
    assert "Loss at fixed noise" in page.text and "Conditioning gap" not in page.text


def test_a_run_that_has_not_begun_and_half_written_lines_are_no_errors(tmp_path: Path) -> None:
    run = write_bare_run(tmp_path / "run", steps=5)
    metrics = run / "logs/metrics.jsonl"
    metrics.write_text(metrics.read_text(encoding="utf-8") + '{"step": 6, "lo', encoding="utf-8")

    begun = Page(as_html(read_run(run)))
    metrics.write_text("", encoding="utf-8")
    not_begun = Page(as_html(read_run(run)))

    assert "1 line of metrics.jsonl could not be read." in begun.text
    assert "The run has not finished a step yet." in not_begun.text
    assert not_begun.sections == ["data", "settings"]


def test_a_setting_of_an_odd_kind_is_left_out(tmp_path: Path) -> None:
    run = write_bare_run(tmp_path / "run", steps=2)
    text = (run / "config.yaml").read_text(encoding="utf-8").replace("in_channels: 1", "in_channels: [1]")
    (run / "config.yaml").write_text(text, encoding="utf-8")

    assert "16 x 16." in Page(as_html(read_run(run))).text


def test_loss_by_noise_level_is_drawn_early_and_late_with_its_own_means(tmp_path: Path) -> None:
    run = write_bare_run(tmp_path / "run", steps=3)
    bins = [[1.0, 8.0, None], [2.0, 2.0, None], [None, 4.0, None]]  # three steps, in the first three eighths
    lines = [
        {"step": step + 1, "loss_by_noise": found + [None] * 4 + [16.0], "pictures_per_second": 1.0}
        for step, found in enumerate(bins)
    ]
    (run / "logs/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    html = as_html(read_run(run))

    drawn = html[html.index("Training loss by noise level") :]
    groups = re.findall(r'<g class="line\d">.*?points="(.*?)".*?<text.*?>(\w+)</text></g>', drawn)
    shapes = {name: [float(point.split(",")[1]) for point in points.split()] for points, name in groups}
    assert {name: len(heights) for name, heights in shapes.items()} == {"start": 3, "middle": 3, "end": 2}
    # logarithmic: from 1 to 16 are four factors of 2
    factor = (shapes["start"][0] - shapes["start"][2]) / 4
    assert shapes["start"][0] - shapes["start"][1] == pytest.approx(3 * factor, abs=0.2)
    assert shapes["middle"][0] == shapes["middle"][1]
    assert shapes["end"][0] - shapes["end"][1] == pytest.approx(2 * factor, abs=0.2)


def test_a_long_run_with_large_grids_stays_below_five_megabytes(tmp_path: Path) -> None:
    run = write_bare_run(tmp_path / "run", steps=3)
    names = [f"samples/step-{step:06d}.png" for step in range(100, 1100, 100)]
    large = write_picture(run / names[0], side=640).read_bytes()  # noise, 1.2 MB
    for name in names:
        (run / name).write_bytes(large)
    (run / "samples/notes.txt").write_text("no grid", encoding="utf-8")
    (run / names[-1]).write_bytes(large[:1000])
    line = (run / "logs/metrics.jsonl").read_text(encoding="utf-8").splitlines()[0]
    (run / "logs/metrics.jsonl").write_text(f"{line}\n" * 20_011, encoding="utf-8")

    path = write_report(run)

    page = Page(path.read_text(encoding="utf-8"))
    assert page.tags.count("img") == MOST_GRIDS - 1 and "step-001000.png cannot be read as a picture" in page.text
    assert "step 100" in page.text and "step 1,000" in page.text
    assert path.stat().st_size < 5_000_000


def test_a_small_picture_stays_as_it_is_and_a_large_transparent_one_is_laid_on_white(tmp_path: Path) -> None:
    small, large = write_picture(tmp_path / "small.png", side=17), tmp_path / "large.png"
    pixels = np.random.default_rng(0).integers(0, 256, (409, 503, 4), dtype=np.uint8)
    pixels[:, :, 3] = 0
    Image.fromarray(pixels).save(large)
    assert large.stat().st_size > LARGEST_PICTURE

    assert b64decode(data_uri(small).removeprefix("data:image/png;base64,")) == small.read_bytes()
    with Image.open(BytesIO(b64decode(data_uri(large).removeprefix("data:image/jpeg;base64,")))) as shown:
        assert shown.convert("L").getextrema() == (255, 255)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.yaml", "a: [", "config.yaml is no YAML"),
        ("config.yaml", "data: {}", "has no section train"),
        ("evaluation.json", "{", "evaluation.json is not JSON"),
        ("evaluation.json", "[]", "holds no figures of evaluate.py"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    run = write_bare_run(tmp_path / "run", steps=2)
    (run / name).write_text(content, encoding="utf-8")

    with pytest.raises(ValueError, match=re.escape(said)):
        write_report(run)
    assert not (run / "report.html").exists()


def test_the_script_prints_the_path_and_refuses_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_bare_run(tmp_path / "run", steps=2)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = import_module("report")

    def answer(folder: Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["report.py", str(folder)])
        return (script.main(), *capsys.readouterr())

    assert answer(run) == (0, f"{run / 'report.html'}\n", "")
    assert answer(tmp_path / "none") == (2, "", f"error: there is no folder {tmp_path / 'none'}\n")
    (run / "model_index.json").write_text("{}", encoding="utf-8")
    (run / "evaluation.json").write_text(json.dumps(evaluation()), encoding="utf-8")
    card = run / "README.md"
    assert answer(run) == (0, f"{run / 'report.html'}\n{card}\n", "")
    assert "| KID x 1000 | 42.77 ± 10.79 |" in card.read_text(encoding="utf-8")
    card.write_text("mine", encoding="utf-8")
    assert answer(run) == (0, f"{run / 'report.html'}\n{card} stays as somebody wrote it\n", "")
    assert card.read_text(encoding="utf-8") == "mine"
    no_run = f"error: {run / 'logs'} is not a run of scripts/train.py: it has no config.yaml\n"
    assert answer(run / "logs") == (2, "", no_run)
