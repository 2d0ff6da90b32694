"""The recipe in a picture, or one line that says why there is none."""

import io
import json

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from pipeline.options import UsageError
from pipeline.show import recipe_in
from tests.fakes import RECIPE, SAMPLER, painted
from transforms.metadata import recipe_text
from transforms.pictures import IMAGE_FORMATS, KEYWORD
from transforms.records import PromptRecord
from transforms.requests import expand


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
def test_a_picture_of_every_kind_shows_its_recipe(tmp_path, kind):
    (request,) = expand(PromptRecord("a.jsonl", 1, "id", "\u00fc red \u009b31m fox", {"seed": 7}), RECIPE, SAMPLER)
    data = IMAGE_FORMATS[kind].encode(painted(request.digest, 8, 8), recipe_text(request, RECIPE), 90)
    (tmp_path / "picture").write_bytes(data)
    shown = recipe_in(str(tmp_path / "picture"))
    assert shown.isascii()  # a terminal takes U+009B for the begin of a command
    recipe = json.loads(shown)
    assert (recipe["prompt"], recipe["seed"], recipe["digest"]) == (request.prompt, 7, request.digest)
    assert {name: recipe[name] for name in RECIPE.of_model()} == RECIPE.of_model()


def _png(text):
    info = PngImagePlugin.PngInfo()
    info.add_text(KEYWORD, text)
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, "PNG", pnginfo=info)
    return file.getvalue()


_WEBP = IMAGE_FORMATS["webp"].encode(np.zeros((8, 8, 3), np.uint8), '{"digest": "", "checkpoint": ""}', 90)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (None, "cannot be read: .*No such file"),
        (b"", "is no picture"),
        (b"no picture", "is no picture"),
        (_png("")[:40], "is no picture|cannot be read"),
        (_png(""), "holds no recipe of this program"),
        (_png("a comment"), "holds no recipe of this program"),
        (_png('{"prompt": "of another program"}'), "holds no recipe of this program"),
        (_png("[" * 100_000), "holds no recipe of this program"),
        (_WEBP.replace(b"MM\0*", b"MM\0?"), "holds no recipe of this program"),
    ],
)
def test_what_holds_no_recipe_is_said_in_a_line(tmp_path, data, complaint):
    if data is not None:
        (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(UsageError, match=complaint):
        recipe_in(str(tmp_path / "a.png"))
