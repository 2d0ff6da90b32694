"""`lightmill show`: the recipe that a picture carries in its own file."""

import json
import warnings

from PIL import Image, UnidentifiedImageError

from pipeline.options import UsageError
from transforms import storage
from transforms.pictures import text_of


def recipe_in(path: str) -> str:
    """All that decides a picture, as JSON for a person.

    Parsed and written again, in ASCII: what stands in a stranger's file must not get at the terminal.

    Raises:
      UsageError: if there is no such file, or no recipe of this program in it.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # Pillow's, about damaged EXIF; below it has a line of its own
            recipe = json.loads(text_of(storage.read_file(path)))
    except UnidentifiedImageError:
        raise UsageError(f"{path} is no picture") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    except (ValueError, SyntaxError, RecursionError, Image.DecompressionBombError):
        recipe = None
    if not isinstance(recipe, dict) or not {"digest", "checkpoint"} <= recipe.keys():
        raise UsageError(f"{path} holds no recipe of this program; editors and web sites often remove it")
    return json.dumps(recipe, indent=1)
