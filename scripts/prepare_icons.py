"""Make a captioned data set of grey icons from the icon fonts in the pip package `qtawesome`.

    python scripts/prepare_icons.py --out data/icons
    python scripts/prepare_icons.py --out data/icons-common --min-per-word 40

Each glyph of Material Design Icons, Phosphor and Remix Icon becomes a PNG, black on white, and its name in words
becomes the caption: "cloud-upload-outline" is "cloud upload outline". Brand logos are left out. Nothing is downloaded.
"""

import argparse
import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from _folder import fresh_folder, refuse_filled, write_metadata
from PIL import Image, ImageDraw, ImageFont

OVERSAMPLING = 4  # glyphs are drawn this much larger, then averaged down: thin strokes keep their true weight
MARGIN = 1 / 32  # of the picture's side, around the font's own design box, which has some air already


class IconFont(NamedTuple):
    """One font of the package: its folder name here, the file patterns in qtawesome/fonts, and its licence."""

    name: str
    font_pattern: str
    charmap_pattern: str
    licence: str


FONTS = (
    IconFont(
        "material-design",
        "materialdesignicons6-webfont-[0-9]*.ttf",
        "materialdesignicons6-webfont-charmap-*.json",
        "Material Design Icons (Pictogrammers), Apache License 2.0, https://pictogrammers.com/docs/general/license/",
    ),
    IconFont(
        "phosphor",
        "phosphor-[0-9]*.ttf",
        "phosphor-charmap-*.json",
        "Phosphor Icons, MIT License, https://github.com/phosphor-icons/web",
    ),
    IconFont(
        "remix",
        "remixicon-[0-9]*.ttf",
        "remixicon-charmap-*.json",
        "Remix Icon 2.5, Apache License 2.0, https://github.com/Remix-Design/RemixIcon",
    ),
)

# A trademark as the first word makes an icon a logo in every font ("apple" is the company; the fruit is "food apple").
BRANDS = frozenset(
    """
    airplay alipay amazon android angular angularjs ansible apache apple artstation atlassian aws babel baidu
    bash behance bilibili bitbucket bitcoin blender bootstrap bulma centos chrome codepen cordova coreos
    cryengine css3 debian deviantart dingding discord disqus dlna docker dolby douban dribbble dropbox drupal
    electron ember emby eslint ethereum evernote facebook fedora figma firebase firefox flattr flutter framer
    freebsd gatsby gentoo github gitlab gmail gnome gog goodreads google gradle graphql hololens honour hubspot
    hulu humble ie instagram invision iobroker jabber jira jquery jsfiddle kakao khanda kickstarter klingon kodi
    kubernetes language laravel lastpass linkedin linux litecoin lumx manjaro mapbox mastercard mastodon meteor
    mickey microsoft minecraft nativescript netease netflix nintendo nix nodejs npm npmjs nuxt odnoklassniki
    onepassword openid opera origin pandora patreon paypal pinterest pixelfed playstation plex pokemon polymer
    powershell qq qqchat quora raspberry react reactjs reddit redhat remixicon rollupjs safari salesforce sass
    semantic skype slack snapchat sony soundcloud spotify stackoverflow stackpath stackshare symfony tailwind
    taobao teamviewer telegram terraform tiktok trello triforce tumblr twitch twitter ubisoft ubuntu umbraco
    unity unreal unsplash vimeo visa vlc vuejs vuetify webpack wechat weibo whatsapp wikipedia wordpress xamarin
    xbox xing xmpp yahoo youtube zcool zend zhihu
    """.split()
)
# Logos whose first word is an ordinary word elsewhere, as whole names without the style suffix.
BRAND_NAMES = {
    "material-design": frozenset({"pocket", "steam"}),
    "phosphor": frozenset(),
    "remix": frozenset(
        "app-store drive edge edge-new finder honor-of-kings keynote line medium messenger mini-program pantone "
        "product-hunt spectrum stack-overflow steam switch windows markdown html5".split()
    ),
}
# Heads that stand for numbers, letters and text formats: drawings of glyphs, which tell a small model nothing.
TEXT_HEADS = frozenset(
    """
    alpha alphabet alphabetical abjad abugida braille format letter numeric number numbers decimal hexadecimal octal
    order roman sort syllabary text
    """.split()
)
REMIX_NUMBERED = frozenset({"bar", "dice", "signal", "wifi", "number"})  # here a number is part of the meaning


class Icon(NamedTuple):
    """A glyph to draw: its font, its name there, its character, its caption."""

    font: IconFont
    name: str
    character: str
    caption: str


def fonts_folder() -> Path:
    """Where qtawesome keeps its fonts; found without importing it, which would want Qt."""
    spec = importlib.util.find_spec("qtawesome")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the icon fonts are not installed: pip install --no-deps qtawesome")
    return Path(spec.submodule_search_locations[0]) / "fonts"


def newest(folder: Path, pattern: str) -> Path:
    """The one file that fits; the last by name if a later release brings several."""
    found = sorted(folder.glob(pattern))
    if not found:
        raise ValueError(f"{folder} has no {pattern}: pip install --no-deps qtawesome==1.4.2")
    return found[-1]


def base_name(name: str) -> str:
    """Without the style: "home-2-fill" and "home-2-line" are both "home-2"."""
    for style in ("-fill", "-line", "-bold", "-light", "-thin", "-outline"):
        name = name.removesuffix(style)
    return name


def is_brand(font: IconFont, name: str) -> bool:
    """Whether the icon is a company's or product's logo, by the lists above and Phosphor's own "logo"."""
    words = name.split("-")
    return "logo" in words or words[0] in BRANDS or base_name(name) in BRAND_NAMES[font.name]


def caption_of(font: IconFont, name: str) -> str:
    """The name in words. Remix numbers its drawings of one thing ("home-2-fill"); such a number is no word."""
    words = name.split("-")
    if font.name == "remix" and not REMIX_NUMBERED & set(words):
        numbered = len(words) > 2 and words[-2].isdigit() and words[-1] in ("fill", "line")
        words = [*words[:-2], words[-1]] if numbered else words
    return " ".join(words)


def find_icons(folder: Path) -> tuple[list[Icon], int]:
    """All icons that are no logos, in the order of FONTS and then of their names, and the number of logos left out."""
    icons, logos = [], 0
    for font in FONTS:
        charmap = json.loads(newest(folder, font.charmap_pattern).read_text(encoding="utf-8"))
        for name, code in sorted(charmap.items()):
            if is_brand(font, name):
                logos += 1
            else:
                icons.append(Icon(font, name, chr(int(code, 16)), caption_of(font, name)))
    return icons, logos


def keep_common(icons: list[Icon], min_per_word: int) -> list[Icon]:
    """The icons whose first word at least `min_per_word` icons share; numbers, letters and text formats dropped."""
    heads = Counter(icon.caption.split()[0] for icon in icons)

    def wanted(head: str) -> bool:
        return heads[head] >= min_per_word and len(head) > 1 and not head.isdigit() and head not in TEXT_HEADS

    return [icon for icon in icons if wanted(icon.caption.split()[0])]


def draw(character: str, font: ImageFont.FreeTypeFont, size: int) -> Image.Image:
    """A glyph, black on white, as a size x size "L" picture.

    The design box of these fonts, em x em, fills the picture up to the margin, so that "circle" stays larger than
    "circle small". A glyph that leaves its box is moved back in.
    """
    side = size * OVERSAMPLING
    left = top = (side - round(font.size)) // 2
    x0, y0, x1, y1 = font.getbbox(character, anchor="la")
    left -= max(0, left + x1 - side) + min(0, left + x0)
    top -= max(0, top + y1 - side) + min(0, top + y0)
    canvas = Image.new("L", (side, side), 255)
    ImageDraw.Draw(canvas).text((left, top), character, fill=0, font=font, anchor="la")
    return canvas.resize((size, size), Image.Resampling.BOX)


def write(icons: list[Icon], fonts: Path, out: Path, size: int) -> int:
    """Draw the icons into `out`, with metadata.jsonl and LICENSES.txt. Returns how many; blank glyphs are left out."""
    em = round(size * OVERSAMPLING * (1 - 2 * MARGIN))
    loaded = {
        font.name: ImageFont.truetype(
            newest(fonts, font.font_pattern),
            em,
            layout_engine=ImageFont.Layout.BASIC,  # the same on every machine
        )
        for font in FONTS
    }
    with fresh_folder(out) as folder:
        rows: list[dict[str, str | list[str]]] = []
        for icon in icons:
            picture = draw(icon.character, loaded[icon.font.name], size)
            if picture.getextrema()[0] == 255:
                continue
            file_name = f"{icon.font.name}/{icon.name}.png"
            (folder / icon.font.name).mkdir(exist_ok=True)
            picture.save(folder / file_name)
            rows.append({"file_name": file_name, "text": icon.caption})
        write_metadata(folder, rows)
        (folder / "LICENSES.txt").write_text(
            "The pictures are drawn from the glyphs of these fonts and keep their licences:\n\n"
            + "".join(f"{font.name}/: {font.licence}\n" for font in FONTS),
            encoding="utf-8",
        )
    return len(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to make; must not exist or be empty")
    parser.add_argument("--size", type=int, default=32, help="side of the pictures in pixels (default 32)")
    parser.add_argument(
        "--min-per-word",
        type=int,
        default=0,
        metavar="N",
        help="keep icons whose first word N icons share; drop numbers, letters and text formats (default: keep all)",
    )
    arguments = parser.parse_args()
    if arguments.size < 8:
        parser.error(f"--size must be at least 8, got {arguments.size}")
    return arguments


def main() -> None:
    arguments = parse()
    refuse_filled(arguments.out)
    fonts = fonts_folder()
    icons, logos = find_icons(fonts)
    print(f"{len(icons)} icons, {logos} brand logos left out")
    if arguments.min_per_word > 0:
        icons = keep_common(icons, arguments.min_per_word)
        print(f"{len(icons)} icons whose first word at least {arguments.min_per_word} share; text formats dropped")
        if not icons:
            raise ValueError(f"no first word is shared by {arguments.min_per_word} icons; lower --min-per-word")
    count = write(icons, fonts, arguments.out, arguments.size)
    captions = len({icon.caption for icon in icons})
    print(f"wrote {count} pictures of {arguments.size} px with {captions} different captions to {arguments.out}")
    for font in FONTS:
        print(f"  {sum(icon.font == font for icon in icons):5d}  {font.licence}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
