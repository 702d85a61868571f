"""The prepare scripts leave a complete data set that the trainer reads, or nothing."""

import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from unet_attn.data import CaptionedImages, DataOptions

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
needs_fonts = pytest.mark.skipif(importlib.util.find_spec("qtawesome") is None, reason="qtawesome is not installed")


def load(name: str) -> ModuleType:
    """A script as a module, importable as it is when started: with its own folder on the path."""
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    return importlib.import_module(name)


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120)


def test_names_become_captions_in_words() -> None:
    icons = load("prepare_icons")
    material, phosphor, remix = icons.FONTS
    assert icons.caption_of(material, "cloud-upload-outline") == "cloud upload outline"
    assert icons.caption_of(phosphor, "bell-simple-thin") == "bell simple thin"
    assert icons.caption_of(remix, "home-2-fill") == "home fill"
    assert icons.caption_of(remix, "dice-2-fill") == "dice 2 fill"
    assert icons.caption_of(remix, "24-hours-line") == "24 hours line"


def test_logos_are_told_from_things_of_the_same_name() -> None:
    icons = load("prepare_icons")
    material, phosphor, remix = icons.FONTS
    assert icons.is_brand(material, "google-drive") and icons.is_brand(material, "microsoft-windows")
    assert icons.is_brand(phosphor, "apple-logo-bold") and icons.is_brand(remix, "line-fill")
    assert not icons.is_brand(material, "food-apple-outline")
    assert not icons.is_brand(phosphor, "line-segment-bold")
    assert not icons.is_brand(remix, "facebookless-fill")


def test_common_icons_drop_rare_first_words_and_text_formats() -> None:
    icons = load("prepare_icons")
    names = ["arrow-up", "arrow-down", "rare-thing", "numeric-1", "numeric-2", "x-fill", "x-line", "24-a", "24-b"]
    listed = [icons.Icon(icons.FONTS[0], name, "x", name.replace("-", " ")) for name in names]
    assert [icon.caption for icon in icons.keep_common(listed, 2)] == ["arrow up", "arrow down"]


@needs_fonts
def test_icons_are_drawn_once_completely_and_the_trainer_reads_them(tmp_path: Path) -> None:
    out = tmp_path / "new" / "icons"
    done = run("prepare_icons.py", "--out", str(out), "--size", "16", "--min-per-word", "300")
    assert done.returncode == 0, done.stderr
    assert "Apache License 2.0" in done.stdout and "MIT License" in done.stdout
    images = CaptionedImages(DataOptions(path=str(out), resolution=16), channels=1)
    rows = [json.loads(line) for line in (out / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(images) == len(rows) > 300 and not images.faults and all(images.captions)
    assert {row["text"].split()[0] for row in rows} <= {"arrow", "file"}
    picture = Image.open(out / rows[0]["file_name"])
    assert picture.mode == "L" and picture.size == (16, 16) and picture.getpixel((0, 0)) == 255
    assert "Phosphor" in (out / "LICENSES.txt").read_text()
    assert [path.name for path in out.parent.iterdir()] == ["icons"], "nothing half-made stays beside it"

    again = run("prepare_icons.py", "--out", str(out))
    assert again.returncode == 2 and again.stderr.count("\n") == 1
    assert again.stderr.startswith(f"error: {out} already exists")


@needs_fonts
def test_glyphs_are_whole_centred_and_in_proportion() -> None:
    icons = load("prepare_icons")
    fonts = icons.fonts_folder()
    for font in icons.FONTS:
        charmap = json.loads(icons.newest(fonts, font.charmap_pattern).read_text(encoding="utf-8"))
        loaded = icons.ImageFont.truetype(icons.newest(fonts, font.font_pattern), 120)
        name = next(n for n in ("checkbox-blank-circle", "circle-fill") if n in charmap or n == "circle-fill")
        name = {"remix": "checkbox-blank-circle-fill"}.get(font.name, name)
        picture = icons.draw(chr(int(charmap[name], 16)), loaded, 32)
        left, top, right, bottom = picture.point(lambda value: 255 - value).getbbox()
        assert abs(left - (32 - right)) <= 1 and abs(top - (32 - bottom)) <= 1
        assert 1 <= left <= 5
        assert picture.getpixel((16, 16)) == 0


def test_a_failed_run_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = load("_folder")
    with pytest.raises(RuntimeError), folder.fresh_folder(tmp_path / "out") as partial:
        (partial / "half.png").write_bytes(b"x")
        raise RuntimeError("disk full")
    assert list(tmp_path.iterdir()) == []


def test_missing_fonts_are_one_line_with_the_command(tmp_path: Path) -> None:
    # -S hides site-packages; Pillow and what the script needs besides come back by PYTHONPATH
    pillow = Path(importlib.util.find_spec("PIL").submodule_search_locations[0])
    (tmp_path / "PIL").symlink_to(pillow)
    command = [sys.executable, "-S", str(SCRIPTS / "prepare_icons.py"), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2 and "pip install --no-deps qtawesome" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def emoji_cache(cache: Path) -> Path:
    """The three npm archives in small: a face, a hand with a skin tone, a skin component, an emoji without a name."""
    emoji = load("prepare_emoji")
    names = [
        {"label": "grinning face", "hexcode": "1F600", "group": 0, "tags": ["face", "happy", "joy"]},
        {"label": "keycap: #", "hexcode": "0023-FE0F-20E3", "group": 8},
        {
            "label": "waving hand",
            "hexcode": "1F44B",
            "group": 1,
            "tags": ["bye"],
            "skins": [{"label": "waving hand: dark skin tone", "hexcode": "1F44B-1F3FF"}],
        },
        {"label": "dark skin tone", "hexcode": "1F3FF", "group": 2},
    ]
    files = {emoji.NAMES: {emoji.NAMES_FILE: json.dumps(names).encode()}}
    picture = io.BytesIO()
    image = Image.new("RGBA", (64, 64), (0, 255, 0, 0))
    image.paste((255, 0, 0, 255), (16, 16, 48, 48))
    image.save(picture, "PNG")
    for drawings in emoji.DRAWINGS:
        stems = ("0023-fe0f-20e3", "1f44b", "1f600", "1f44b-1f3ff", "1f3ff", "1f9ff")
        files[drawings.package] = {f"package/img/{drawings.name}/64/{stem}.png": picture.getvalue() for stem in stems}
    (cache / "unet-attn/npm").mkdir(parents=True)
    for package, content in files.items():
        with tarfile.open(cache / "unet-attn/npm" / (package.replace("@", "-") + ".tgz"), "w:gz") as archive:
            for name, data in content.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return cache


@pytest.mark.parametrize("skin_tones", [False, True])
def test_emoji_are_composited_on_white_with_names_and_tags(tmp_path: Path, skin_tones: bool) -> None:
    cache, out = emoji_cache(tmp_path / "cache"), tmp_path / "emoji"
    options = ["--skin-tones"] if skin_tones else []
    done = run("prepare_emoji.py", "--out", str(out), *options, XDG_CACHE_HOME=str(cache))
    assert done.returncode == 0, done.stderr
    images = CaptionedImages(DataOptions(path=str(out)))
    by_name = {
        path.relative_to(out).as_posix(): captions for path, captions in zip(images.paths, images.captions, strict=True)
    }
    assert by_name["google/1f600.png"] == ["grinning face", "grinning face, happy, joy"]
    assert by_name["twitter/23-20e3.png"] == ["keycap: #"]
    assert ("google/1f44b-1f3ff.png" in by_name) == skin_tones
    assert len(images) == (8 if skin_tones else 6)
    assert images[0]["image"][:, 0, 0].tolist() == [1.0, 1.0, 1.0]
    assert images[0]["image"][:, 16, 16].tolist() == [1.0, -1.0, -1.0]
    assert "CC-BY 4.0" in (out / "LICENSES.txt").read_text()


def test_without_a_home_folder_it_is_said_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where there is none
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(ValueError, match="no home folder to keep the packages in: set XDG_CACHE_HOME"):
        load("prepare_emoji").cache_folder()


def test_missing_npm_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    done = run(
        "prepare_emoji.py", "--out", str(tmp_path / "out"), XDG_CACHE_HOME=str(tmp_path / "cache"), PATH=str(tmp_path)
    )
    assert done.returncode == 2 and done.stderr.startswith("error: npm is not installed: install Node.js")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_failed_fetch_names_the_command_and_leaves_no_archive(tmp_path: Path) -> None:
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text("#!/bin/sh\necho 'npm error network unreachable' >&2\nexit 1\n")
    npm.chmod(0o755)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": f"{npm.parent}:/usr/bin:/bin"}
    done = run("prepare_emoji.py", "--out", str(tmp_path / "out"), **environment)
    assert (
        done.returncode == 2 and "npm pack emojibase-data@17.0.0 failed: npm error network unreachable" in done.stderr
    )
    assert list((tmp_path / "cache/unet-attn/npm").iterdir()) == [] and not (tmp_path / "out").exists()


def test_a_damaged_archive_is_named_with_the_way_out(tmp_path: Path) -> None:
    cache = emoji_cache(tmp_path / "cache")
    archive = next((cache / "unet-attn/npm").glob("emoji-datasource-twitter*"))
    archive.write_bytes(archive.read_bytes()[:60])
    done = run("prepare_emoji.py", "--out", str(tmp_path / "out"), XDG_CACHE_HOME=str(cache))
    assert done.returncode == 2 and "is damaged" in done.stderr and "remove that folder" in done.stderr
    assert not (tmp_path / "out").exists()
