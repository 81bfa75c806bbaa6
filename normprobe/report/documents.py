"""Documents that an earlier run wrote, read from files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from normprobe.errors import NormprobeError

Document = TypeVar("Document")


def read_document(
    path: str | os.PathLike[str],
    what: str,
    schema: str,
    parse: Callable[[Any], Document],
    *,
    parts: Collection[str] = (),
    hint: str,
    raises: type[NormprobeError] = NormprobeError,
) -> Document:
    """What `parse` makes of the JSON document in a file.

    Args:
        path: the file.
        what: name of the document, for the message.
        schema: what its key "schema" has to say.
        parse: from the parsed JSON, which is an object with that schema.
        parts: keys that every such document has.
        hint: how to come by such a file.
        raises: the class of the error.

    Raises:
        NormprobeError: there is no such file, it is no JSON, or no document of that schema.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        found = _amiss(document, schema, parts)
        if not found:
            return parse(document)
    except OSError as error:
        found = error.strerror or str(error)
    except ValidationError as error:
        first = error.errors()[0]
        found = f"{first['msg']} at `{'.'.join(map(str, first['loc'])) or 'the top'}`"
    except ValueError as error:
        found = f"no JSON text: {error}"
    expected = f"a document of schema {schema}"
    raise raises(f"cannot read {what} from `{path}`", expected=expected, found=found, hint=hint)


def _amiss(document: Any, schema: str, parts: Collection[str]) -> str:
    """What it is in place of the document that is wanted; empty where it is none but that."""
    if not isinstance(document, dict):
        return f"JSON that holds no object but {type(document).__name__}"
    if lacking := {"schema", *parts} - document.keys():
        return f"a document without {' and '.join(sorted(lacking))}"
    return "" if document["schema"] == schema else f"a document of schema {document['schema']!r}"
