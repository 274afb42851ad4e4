"""Data inside a page of HTML."""

from __future__ import annotations

import json
from typing import Any


def embedded(data: Any) -> str:
    """Data as JSON that may stand inside a `script` element, whatever strings are in it.

    Raises:
        ValueError: A number is not finite, which JSON has no word for.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # `</script>` would end the element and `<!--` hide what follows; JSON reads the same with these.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
