import numpy as np
import pytest
import torch
from PIL import Image

from unet_attn.pipelines.grid import GAP, HEAT, attention_sheet, picture_grid


def test_pictures_stand_in_rows_and_are_enlarged_by_a_whole_factor():
    colours = ["red", "lime", "blue", "black", "gray"]
    images = [Image.new("RGB", (31, 47), colour) for colour in colours]
    grid = picture_grid(images, ["one", "two", "three", "four", "five"], columns=3)
    # 47 goes three times into more than 96
    width, height = 93, 141
    assert grid.mode == "RGB" and grid.width == 3 * (width + GAP) + GAP
    pixels = np.asarray(grid)
    row = (grid.height - GAP) // 2
    for index, image in enumerate(images):
        left, top = GAP + index % 3 * (width + GAP), GAP + index // 3 * row
        cell = pixels[top : top + height, left : left + width]
        assert (cell == np.asarray(image)[0, 0]).all()
        caption = pixels[top + height : top + row - GAP, left : left + width]
        assert (caption < 128).any() and (caption == 255).any()


def test_grey_pictures_and_captions_of_any_script_and_length_fit():
    images = [Image.new("L", (17, 17), 90)] * 3
    grid = picture_grid(images, ["雲 ☁ naïve", "w" * 300 + " " + "many words " * 50, ""], columns=2)
    assert np.asarray(grid)[GAP + 1, GAP + 1].tolist() == [90, 90, 90]
    # nothing is written over the next picture or the margin
    assert (np.asarray(grid)[:, -GAP:] == 255).all()


@pytest.mark.parametrize(("images", "captions", "columns"), [(0, 0, 1), (2, 1, 1), (1, 1, 0)])
def test_a_grid_that_cannot_be_laid_out_is_refused(images, captions, columns):
    with pytest.raises(ValueError, match=f"a grid of {columns} columns cannot hold {images} pictures with {captions}"):
        picture_grid([Image.new("L", (8, 8))] * images, ["a"] * captions, columns)


def test_a_sheet_shows_the_picture_and_each_word_in_red_where_it_was_attended_to():
    image = Image.new("RGB", (100, 100), (200, 200, 200))
    maps = torch.zeros(2, 100, 100)
    maps[0, :50], maps[1, 50:] = 0.5, 0.25
    sheet = np.asarray(attention_sheet(image, ("sun", "sea"), maps, "sun sea", 3))
    top, bottom = GAP + 10, GAP + 90
    places = [GAP + number * (100 + GAP) + 50 for number in range(3)]
    assert sheet[top, places[0]].tolist() == sheet[bottom, places[0]].tolist() == [200, 200, 200]
    assert sheet[top, places[1]].tolist() == list(HEAT) and sheet[bottom, places[1]].tolist() == [200, 200, 200]
    # half as strong as the strongest
    assert sheet[bottom, places[2]].tolist() == [round((200 + part) / 2) for part in HEAT]
    assert attention_sheet(image, (), torch.zeros(0, 100, 100), "", 3).size[0] == 100 + 2 * GAP


def test_a_caption_of_any_length_is_cut_where_a_short_one_is() -> None:
    picture = Image.new("L", (96, 96))
    words = "word " * 30
    expected = np.asarray(picture_grid([picture], [words], 1))
    assert np.array_equal(np.asarray(picture_grid([picture], [words * 10_000], 1)), expected)  # hours, once
    assert picture_grid([picture], ["w" * 10**6], 1).size == picture_grid([picture], ["w"], 1).size
